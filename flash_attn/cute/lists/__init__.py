"""Block lists: forms, construction, validation, semaphore values and backward plans."""
