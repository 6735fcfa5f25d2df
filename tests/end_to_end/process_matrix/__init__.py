"""Parts of tests/end_to_end/test_process_matrix.py: cases, worker processes, and a watch on KV in
pages."""
