"""The transport over UCX: a ctypes binding of libucp, one worker, and the thread that owns it."""
