"""Shuts the process that calls it in: no network, no other processes, no files but the given ones, for good.

Three layers of Linux, none of which needs privileges; standard library only:
- seccomp denies sockets, new processes, signals to others, tracing, mounts and changes of ownership;
- Landlock (kernel 5.13) leaves `readable` to read and `scratch` to write; where it is missing, a mount
  namespace makes everything read-only and hides /proc;
- user, network and IPC namespaces, where they are allowed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress

_NEWNS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_NO_NEW_PRIVS, _SET_SECCOMP, _SET_PDEATHSIG = 38, 22, 1
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""machine → its audit code, and its column in the table of calls."""
_SHARED = (
    *(424, 434, 438, 440),  # pidfd_send_signal, pidfd_open, pidfd_getfd, process_madvise
    *(425, 426, 427),  # io_uring: its requests pass no filter
    *(428, 429, 430, 431, 432, 433, 442),  # the newer mount calls
    *(452, 463, 466),  # fchmodat2, setxattrat, removexattrat
)
_DENIED = (
    *((41, 198), (42, 203), (49, 200)),  # socket, connect, bind
    *((57, None), (58, None), (59, 221), (322, 281)),  # fork, vfork, execve, execveat
    *((62, 129), (200, 130), (234, 131), (129, 138), (297, 240)),  # kill, tkill, tgkill, sigqueue, tgsigqueue
    *((101, 117), (310, 270), (311, 271)),  # ptrace, process_vm_readv, process_vm_writev
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51)),  # unshare, setns, mounts, chroot
    *((90, None), (91, 52), (268, 53)),  # chmod: Landlock does not watch it, nor owners, attributes and times
    *((92, None), (93, 55), (94, None), (260, 54)),
    *((188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16)),
    *((132, None), (235, None), (261, None), (280, 88), (76, 45)),
    *((29, 194), (64, 190), (68, 186), (240, 180)),  # System V and POSIX queues, shared memory
    *((321, 280), (323, 282), (298, 241), (248, 217), (249, 218), (250, 219)),  # bpf … keyctl
    *((175, 105), (313, 273), (246, 104), (169, 142)),  # modules, kexec, reboot
)
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)

libc = ctypes.CDLL(None, use_errno=True)


class NoIsolation(Exception):
    """This machine cannot shut a process in; the text says what is missing."""


def die_with_parent() -> None:
    libc.prctl(_SET_PDEATHSIG, 9)


def isolate(scratch: str, readable: Sequence[str], memory: int, cpu_s: int, file_bytes: int) -> None:
    """Shut this process in. scratch: the one directory it may write to; memory and file_bytes in bytes.

    Raises NoIsolation, after which the process must not run anything foreign.
    """
    mounts_closed = _namespaces(scratch)
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _drop_capabilities()
    if not _landlock(scratch, readable) and not mounts_closed:
        raise NoIsolation(
            "files cannot be protected: the kernel has no Landlock (5.13 or newer, `landlock` in "
            "/sys/kernel/security/lsm) and allows no mount namespace (kernel.unprivileged_userns_clone)"
        )
    _seccomp()


def _namespaces(scratch: str) -> bool:
    """Namespaces of its own, if they are allowed; whether files are now read-only and /proc is hidden."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET | _NEWIPC | _NEWNS) != 0:
        return False
    with suppress(OSError):
        ids = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
        for name, text in ids:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    place = scratch.encode()
    read_only = struct.pack("QQQQ", _MS_RDONLY, 0, 0, 0)
    closed = (
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(place, place, None, _MS_BIND, None) == 0  # a mount of its own …
        and libc.syscall(442, -100, b"/", 0x8000, read_only, len(read_only)) == 0  # mount_setattr, recursive
        # … which becomes writable again
        and libc.mount(b"none", place, None, _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV, None) == 0
        and libc.mount(b"none", b"/proc", b"tmpfs", _MS_RDONLY, None) == 0
    )
    os.chdir(scratch)  # from the mount below into the writable one
    return closed


def _drop_capabilities() -> None:
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(libc.capset(header, none), "capset")


def _landlock(scratch: str, readable: Sequence[str]) -> bool:
    """Close the file system but for these places; False where the kernel has no Landlock."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    everything = (1 << 13) - 1  # execute, write_file, read_file, read_dir, remove_*, make_*
    everything |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # refer, truncate
    everything |= 1 << 15 if version >= 5 else 0  # ioctl on devices
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", everything, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(444, attributes, size, 0)
    _check(rules, "landlock_create_ruleset")
    for path, rights in ((scratch, everything), *((path, 0b1101) for path in readable)):
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= 0b101  # a file has no entries to list
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, place)
        _check(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule of {path}")
        os.close(place)
    _check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return True


def _seccomp() -> None:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise NoIsolation(f"there is no list of system calls for {machine}; x86_64 and aarch64 have one")
    audit, column = _ARCHITECTURES[machine]
    denied = [*_SHARED, *(pair[column] for pair in _DENIED if pair[column] is not None)]
    program = [
        _load(4), _jump(0x15, audit, 1, 0), _return(_KILL),
        _load(0), _jump(0x35, _X32, 0, 1), _return(_ERRNO | _EPERM),
    ]  # fmt: skip
    for number in denied:
        program += [_jump(0x15, number or 0, 0, 1), _return(_ERRNO | _EPERM)]
    program += [_jump(0x15, _CLONE3, 0, 1), _return(_ERRNO | _ENOSYS)]  # glibc then takes clone, read below
    # clone may make threads only; prlimit may only be about the caller. Offset 16 is the first argument.
    program += [_jump(0x15, _CLONE[column], 0, 4), _load(16), _jump(0x45, _CLONE_THREAD, 1, 0),
                _return(_ERRNO | _EPERM), _return(_ALLOW)]  # fmt: skip
    program += [_jump(0x15, _PRLIMIT[column], 0, 4), _load(16), _jump(0x15, 0, 1, 0),
                _return(_ERRNO | _EPERM), _return(_ALLOW)]  # fmt: skip
    program.append(_return(_ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _check(libc.prctl(_SET_SECCOMP, 2, filters, 0, 0), "seccomp")


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _return(value: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, value)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise NoIsolation(f"{what} was refused: {os.strerror(ctypes.get_errno())}")
