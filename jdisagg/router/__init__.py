"""Brain 1: which worker serves a request, decided by pure functions of a snapshot."""
