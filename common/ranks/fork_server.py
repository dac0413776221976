"""The process that local ranks are forked from. It leaves no file behind, whatever ends it or its parent."""

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver


def start():
    """Start the fork server, unless it runs. Linux alone has what this needs.

    multiprocessing has it listen at a path below the folder for temporary files. That may be longer than the address of
    a socket can be, and a process that is killed leaves it there. But what a process has open has a short name under
    /proc/self/fd as well. So the server comes to listen under such a name of a folder; and once its socket is open
    here, neither the folder nor the socket's own name are needed. There is no public way to tell multiprocessing so.
    """
    server, config = forkserver._forkserver, multiprocessing.current_process()._config
    before = config.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        descriptor = os.open(folder, os.O_DIRECTORY)
        config["tempdir"] = f"/proc/self/fd/{descriptor}"
        try:
            server.ensure_running()
            address = server._forkserver_address
            if os.path.dirname(address) == config["tempdir"]:  # it did not run before
                server._forkserver_address = f"/proc/self/fd/{os.open(address, os.O_PATH)}"
        finally:
            config["tempdir"] = before
            os.close(descriptor)
