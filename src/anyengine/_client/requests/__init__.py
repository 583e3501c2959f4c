"""Requests under way.

``desk`` sends and aborts them, ``output_processor`` feeds their ``state``, and a ``stream`` gives it to its consumer.
"""
