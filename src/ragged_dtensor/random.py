"""Initialisation that does not depend on the sharding: a ragged tensor gets the values of the unsharded one."""
