"""The child processes that serve weights, found by the socket at which they listen."""

import os
import signal

import psutil


def server_at(url):
    """Returns the id of the process that serves the weights at a URL on this machine, besides those that started it."""
    port = int(url.rpartition(":")[2])
    holders = [one for one in psutil.process_iter() if _listens(one, port)]
    (server,) = {one.pid for one in holders} - {one.ppid() for one in holders}
    return server


def kill_server(url):
    """Kills the process that serves the weights at a URL, and returns its id."""
    server = server_at(url)
    os.kill(server, signal.SIGKILL)
    return server


def _listens(process, port):
    try:
        return (port, psutil.CONN_LISTEN) in [(one.laddr.port, one.status) for one in process.net_connections("tcp4")]
    except psutil.Error:  # it has ended, or belongs to another user
        return False
