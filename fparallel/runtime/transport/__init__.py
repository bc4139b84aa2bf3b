"""Transports: how the ranks of a schedule exchange tensors."""
