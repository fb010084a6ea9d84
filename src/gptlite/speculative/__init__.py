"""More than one token per step: drafters, and the check that keeps the target's distribution."""
