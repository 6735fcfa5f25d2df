"""Code that the clients share: requests, streams and answers. Uses neither JAX nor the router."""
