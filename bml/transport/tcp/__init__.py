"""The backend on TCP sockets: how a connection sends and receives frames, and zero-copy sends."""
