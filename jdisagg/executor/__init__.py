"""The hands: JAX programs on one mesh, run by command.

`mesh_executor` runs commands on two threads (dispatch, completion); `prefill_program`,
`decode_program`, `block_programs` build the jitted programs; `page_pool` and `slot_state` own the
device memory they work on."""
