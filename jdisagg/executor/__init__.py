"""JAX programs on one mesh, run by step commands.

`mesh_executor` runs commands on two threads (dispatch, completion). `prefill_program`,
`decode_program` and `block_programs` build the jitted programs. `page_pool` and `slot_state`
describe the device memory that these programs use."""
