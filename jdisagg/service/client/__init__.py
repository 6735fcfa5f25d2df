"""Code that the blocking and the asyncio client share: requests, streams and answers. Uses neither
JAX nor the router."""
