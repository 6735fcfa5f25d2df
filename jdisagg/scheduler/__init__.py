"""Brain 2: what one worker does next, decided by pure state machines; time and randomness are
arguments."""
