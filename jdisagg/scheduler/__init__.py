"""Decides what one worker does next, in pure state machines. Time and randomness are arguments."""
