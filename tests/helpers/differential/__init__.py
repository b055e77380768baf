"""Ops, arguments and contexts for the comparison of calls with those of torch.library."""
