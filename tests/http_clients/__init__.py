"""Other projects' clients, unmodified, each in an environment of its own, against a real server:
`python -m tests.http_clients`. Long, and from a package index: in no lane."""
