"""What the clients share: requests, streams and answers, without JAX or the router."""
