"""Code that the blocking and the asyncio client share: requests, streams and answers. Imports
neither JAX nor the router."""
