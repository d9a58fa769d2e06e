"""Training and measuring with consensus_opt: what a user would write, and what the claims rest on.

Nothing in here is imported by the package itself. `train` is one ordinary training loop, `compare`
runs it once for each method and puts the outcomes side by side, `rounds` times single rounds.
"""
