"""What would an H200 or a GB200 run of each of our programs? Compiled for it, without one.

    python -m benchmarks.gpu_programs --device=h200 --model=llama-3-8b --layout=dp=1,tp=1 --layers=2

Prints a JSON line for each program that the executor's own warm-up builds (`GpuCounted`):
CUDA graphs, loops that the host drives, kernels, copies, bytes. A program is right for a GPU when
it is one graph (or too small to be one), drives no loop from the host, copies neither weights nor
pages, and holds them in place (`alias_bytes` is at least the pool's). --what takes some of decode,
updates, prefill, blocks, pair (the two programs of steps with grammars) and drafts (those of steps
that verify drafts); --window=N gives every layer a window. --what=start --role=mixed (prefill,
decode) takes all that such a worker compiles before it is ready. The last line has the number of
programs, and the processor seconds of their tracing, of their compilation and of the process.
With pipeline stages there is also a line for each copy from the mesh of one stage to another.
Needs `pip install jax[cuda13]`."""

from benchmarks.device_programs import Case, parser_of, print_counts


def main() -> None:
    parser = parser_of(__doc__, ("h200", "gb200"))
    print_counts(Case(**vars(parser.parse_args())), parser)


if __name__ == "__main__":
    main()
