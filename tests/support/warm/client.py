"""Ask the server beside this file for a process, and stand in for that process until it ends."""

import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Send the request; then the server sends the pid, or -1 if it cannot help, and the status."""
    name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name == "paceline":
        arguments = ["-m", "paceline", *arguments]
    open_files = [int(fd) for fd in os.listdir("/proc/self/fd")]
    files = [fd for fd in open_files if _is_inherited(fd)]
    pid, early = 0, []

    def forward(number, frame):
        os.kill(pid, number) if pid > 0 else early.append(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
        request = {
            "arguments": arguments,
            "program": os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python"),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
        }
        body = json.dumps(request).encode()
        socket.send_fds(server, [struct.pack("!I", len(body))], files)
        server.sendall(body)
        (pid,) = struct.unpack("!i", _read(server))
        if pid < 0:
            for number in FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, *arguments])
        for number in early:
            os.kill(pid, number)
        (status,) = struct.unpack("!i", _read(server))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inherited(fd):
    try:
        return os.get_inheritable(fd)
    except OSError:  # it listed the folder
        return False


def _read(server):
    """The next number, of four bytes."""
    data = server.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        sys.exit("the server of the tests' Python has ended")
    return data


main()
