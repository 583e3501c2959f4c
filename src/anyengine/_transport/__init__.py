"""Opaque messages between processes: sockets that move frames and do not know what they mean.

``abc`` says what a message socket is; ``zmq_socket`` and ``memory`` are the two implementations, on one common
discipline (``socket_base``); ``endpoints`` is a client's listening side; ``monitor`` tells peers that come and go.
"""
