"""What tests/end_to_end/test_process_matrix.py is made of: cases, worker processes, and who looks
at KV in pages."""
