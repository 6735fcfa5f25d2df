"""Named scripts, one question each. Figures are ratios of interleaved runs in one process.

`results/` keeps them with machine, versions and commit.
"""
