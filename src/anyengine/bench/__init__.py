"""Benchmarks of the client, each against a scripted engine. ``anyengine bench`` runs them; none of them is a test."""
