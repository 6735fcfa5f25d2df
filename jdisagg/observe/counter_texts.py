"""Descriptions of the counters of each component, for operators. A scrape of the metrics exports
these counters from the start of the process, with the value 0."""

from collections.abc import Mapping

PATH, ROLES, WORKER, KV_LINK = "path", "roles", "worker", "kv_link"

_OF_PATH = {
    "attempts_failed": "Attempts at requests that failed; the router then tries another worker.",
    "attempts_unreached": "Attempts at requests that did not reach a worker.",
    "moves_failed": "Running sequences that could not be moved to another decode worker.",
    "pairs_failed": "Failures of a pair of workers, after which the router avoids the pair.",
    "placements": "Requests placed on a pair of workers, by the reason of the choice.",
    "preemptions": "Sequences that lost their KV pages to others.",
    "rejections": "Requests refused by the router, by cause: full queue, deadline, quota.",
    "requests_held": "Requests that waited at the router because all workers were full.",
    "requests_resumed": "Suspended requests that were resumed.",
    "requests_suspended": "Requests that were suspended.",
    "weights_updated": "Updates after which workers serve new weights.",
    "weights_updates_asleep": "Updates in which workers slept, for lack of memory for two copies.",
    "weights_updates_failed": "Updates of weights after which all workers serve the old ones.",
    "waits_for_overloaded_workers": "Waits of a request because the chosen worker was full.",
}
_OF_ROLES = {
    "role_switches_failed": "Failed changes of a worker between prefill and decode.",
    "roles_switched": "Changes of a worker between prefill and decode.",
}
_OF_KV_LINK = {
    "kv_messages_lost": "Control messages about KV transfers that did not arrive.",
    "kv_messages_misdirected": "Control messages for an earlier start of this worker, dropped.",
    "kv_messages_received": "Control messages about KV transfers received.",
    "kv_messages_sent": "Control messages about KV transfers sent.",
}
_OF_WORKERS = {
    "accepted_tokens": "Drafted tokens that the model accepted in speculative decoding.",
    "adapter_evictions": "LoRA adapters removed from their slot because another one needed it.",
    "adapter_load_bytes": "Bytes of LoRA adapters read into device memory.",
    "adapter_loads": "LoRA adapters loaded into a slot.",
    "answers_continued": "Answers that gave way and went on without computing anything again.",
    "attempts_superseded": "Attempts that ended because the router began a newer one.",
    "blocks_pulled_again": "KV blocks transferred again after a failure or a wrong checksum.",
    "checksums_mismatched": "KV blocks that arrived damaged. They are transferred again.",
    "chunks_held_back": "Prefill chunks that waited until earlier KV had been transferred.",
    "disk_blocks_dropped": "Prefix-cache blocks removed from disk, by cause.",
    "disk_blocks_found": "Prefix-cache blocks on disk at the worker's start.",
    "disk_blocks_read": "Prefix-cache blocks read from disk.",
    "disk_blocks_restored": "Prefix-cache blocks copied from disk to device pages.",
    "disk_blocks_skipped": "Blocks and snapshots not written because the disk has them or is busy.",
    "disk_blocks_written": "Prefix-cache blocks written to disk.",
    "disk_bytes_read": "Bytes of prefix cache read from disk.",
    "disk_bytes_written": "Bytes of prefix cache written to disk.",
    "disk_tokens_restored": "Prompt tokens with KV restored from disk.",
    "disk_errors": "Failed reads and writes of the prefix cache on disk, by cause.",
    "disk_snapshots_broken": "Snapshots of states or windows on disk that failed their checksum.",
    "disk_snapshots_restored": "Snapshots of states or windows copied from disk to the device.",
    "disk_snapshots_written": "Snapshots of states or windows written to disk.",
    "drafted_tokens": "Tokens drafted for speculative decoding.",
    "drains_cut_short": "Shutdowns that ended running sequences, because the drain took too long.",
    "forced_tokens": "Tokens that a grammar determined, which needed no decode step.",
    "handoffs_aborted": "Hand-offs of a prompt's KV from prefill to decode, by result.",
    "handoffs_completed": "Hand-offs of a prompt's KV from prefill to decode, by result.",
    "handoffs_failed": "Hand-offs of a prompt's KV from prefill to decode, by result.",
    "host_blocks_broken": "Prefix-cache blocks in host memory that failed their checksum.",
    "host_blocks_declined": "Evicted blocks not copied to host memory because few are reused.",
    "host_blocks_dropped": "Prefix-cache blocks removed from host memory, by cause.",
    "host_blocks_failed": "Blocks and snapshots that could not be copied to host memory.",
    "host_blocks_restored": "Prefix-cache blocks copied from host memory to device pages.",
    "host_blocks_skipped": "Prefix-cache blocks not copied because host memory is busy.",
    "host_blocks_written": "Prefix-cache blocks copied to host memory.",
    "host_restores_failed": "Failed copies of prefix cache from host memory to the device.",
    "host_restores_late": "Copies of prefix cache to the device that were cancelled as too slow.",
    "host_snapshots_broken": "Snapshots in host memory that failed their checksum.",
    "host_snapshots_declined": "Snapshots not copied to host memory because few are reused.",
    "host_snapshots_restored": "Snapshots copied from host memory to the device.",
    "host_snapshots_skipped": "Snapshots not copied because host memory is busy.",
    "host_snapshots_written": "Snapshots of states or windows copied to host memory.",
    "host_tokens_restored": "Prompt tokens with KV restored from host memory.",
    "kv_tokens_kept": "Tokens whose transferred KV was kept when the prefill worker was replaced.",
    "leases_expired": "Reservations of KV that ended because their lease was not renewed.",
    "mesh_failures": "Failures of the device mesh. The worker then restarts.",
    "messages_to_senders_lost": "Messages to prefill workers that did not arrive.",
    "moves_begun": "Moves of running sequences to another decode worker begun.",
    "moves_failed": "Running sequences that could not be moved to another decode worker.",
    "peer_blocks_given": "Prefix-cache blocks sent to other workers.",
    "peer_blocks_fetched": "Prefix-cache blocks fetched from other workers.",
    "peer_fetch_failed": "Failed fetches of prefix cache from other workers, by cause.",
    "peer_gives_cut": "Transfers of prefix cache to other workers that were cut short.",
    "peer_snapshots_fetched": "Snapshots of states or windows fetched from other workers.",
    "peer_tokens_restored": "Prompt tokens with KV fetched from other workers.",
    "prefix_asked_tokens": "Prompt tokens looked up in the prefix cache.",
    "prefix_blocks_evicted": "Prefix-cache blocks removed from device pages, by cause.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache, by tier.",
    "prefix_waits": "Prompts that waited for the blocks of another prompt in progress.",
    "prefix_waits_taken_over": "Waits after which the waiting prompt computed the blocks itself.",
    "prompts_appended": "Prompts whose new tokens were computed on the decode worker itself.",
    "pulls_failed": "KV transfers that failed or timed out. They are repeated.",
    "pulls_timed_out": "KV transfers that failed or timed out. They are repeated.",
    "sequences_moved": "Running sequences moved to another decode worker.",
    "sequences_yielded": "Sequences preempted for requests of higher priority.",
    "snapshots_evicted": "Snapshots of states or windows dropped from device memory.",
    "snapshots_kept": "Snapshots of states or windows kept at ends of cached prefixes.",
    "snapshots_used": "Prompts and fetches that continued from a snapshot.",
    "sources_lost": "Hand-offs whose prefill worker disappeared.",
    "sources_replaced": "Hand-offs continued by another prefill worker.",
    "sleeps": "Sleeps of the worker, in which it freed its weights and pages.",
    "tokens_appended": "Prompt tokens computed on decode workers.",
    "weights_staged": "Checkpoints read into device memory while older weights are served.",
    "weights_staged_bytes": "Bytes of these checkpoints on the worker's devices.",
    "weights_updates": "Replacements of the worker's weights.",
}
TEXTS: Mapping[str, Mapping[str, str]] = {
    PATH: _OF_PATH,
    ROLES: _OF_ROLES,
    KV_LINK: _OF_KV_LINK,
    WORKER: _OF_WORKERS,
}
_ALL = {name: text for texts in TEXTS.values() for name, text in texts.items()}


def text_of(counter: str) -> str:
    return _ALL.get(counter, f"Counter {counter} of its owner.")


def names_of(owner: str, is_worker: bool) -> Mapping[str, str]:
    return TEXTS[WORKER] if is_worker else TEXTS.get(owner, {})
