"""Block lists: their forms, how they are built, checked, ordered and dealt out."""
