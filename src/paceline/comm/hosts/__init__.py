"""Ranks on many hosts, which come and go: ZeroMQ between them, and a registrar that knows them."""
