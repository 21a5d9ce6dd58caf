"""Fuzzing: cases drawn by hypothesis, properties that must hold for every one of them, and planted faults to find."""
