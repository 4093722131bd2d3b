"""Broken files made from whole ones, and pickles that would run code if anything let them."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random

MAX_BYTES = 200_000
# A pickle that is run leaves this file in the current directory.
SENTINEL = "segtrain-fuzz-sentinel"

_INTS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1)
_FORMATS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")
_NUMBERS = (b"-1", b"0", b"255", b"256", b"65536", b"1e999", b"1e-999", b"9" * 30, b"-0", b"nan")
_PNG = b"\x89PNG\r\n\x1a\n"

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]


def mutate(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """`data` with one to six changes; `words` are pieces that mean something in its format."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        data = rng.choice(_CHANGES)(rng, data, words)[:MAX_BYTES]
    return data


def mutate_png(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """Mostly a change inside a chunk, or of the order of chunks, with every checksum right."""
    chunks = _png_chunks(data)
    if not chunks or rng.random() < 0.2:
        return mutate(rng, data, words)
    i = rng.randrange(len(chunks))
    kind, body = chunks[i]
    match rng.randrange(8):
        case 0:
            chunks.insert(rng.randrange(len(chunks) + 1), chunks[i])
        case 1:
            del chunks[i]
        case 2:
            chunks.insert(rng.randrange(len(chunks)), (rng.choice(_CHUNK_KINDS), body))
        case 3 if kind == b"IDAT":
            chunks[i] = kind, zlib.compress(mutate(rng, _inflated(body), words))
        case 4 | 5:
            # The header: sizes, depth and colour type decide what all the rest means.
            chunks[0] = chunks[0][0], _changed_header(rng, chunks[0][1])
        case _:
            chunks[i] = kind, mutate(rng, body, words)
    return _PNG + b"".join(_chunk(kind, body) for kind, body in chunks)


def mutate_zip(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """Mostly a change inside a member of the archive, as a rule its pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # what an earlier change has broken
        members = {}
    if not members or rng.random() < 0.2:
        return mutate(rng, data, words)
    pickles = [name for name in members if name.endswith(".pkl")]
    name = rng.choice(pickles if pickles and rng.random() < 0.8 else list(members))
    if rng.random() < 0.05:
        del members[name]
    else:
        members[name] = mutate(rng, members[name], words)
    return zipped(members)


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive as torch.save makes them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def malicious_pickles() -> list[bytes]:
    """Pickles that create the sentinel, each through another opcode or another detour."""
    command = f"touch {SENTINEL}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    code = f"open({SENTINEL!r}, 'w')".encode()
    source = b"X" + struct.pack("<I", len(code)) + code
    one, run = b"\x85", b"R"  # TUPLE1, REDUCE

    def word(name: bytes) -> bytes:
        return b"\x8c" + bytes([len(name)]) + name

    reduced = b"cos\nsystem\n" + text + one + run
    inner = b"\x80\x02" + reduced + b"."
    nested = b"B" + struct.pack("<I", len(inner)) + inner
    system, set_state = word(b"system"), word(b"__setstate__")
    typed = b"cos\nsystem\ncbuiltins\nint\n" + text
    popen = b"csubprocess\nPopen\n" + b"](X\x05\0\0\0touch" + word(SENTINEL.encode()) + b"e" + one
    bodies = [
        reduced,
        b"cbuiltins\neval\n" + source + one + run,
        b"cbuiltins\nexec\n" + source + one + run,
        b"ctorch.storage\n_load_from_bytes\n" + nested + one + run,
        b"ctorch\nload\n" + nested + one + run,
        # getattr(torch.serialization.os, "system")(command)
        b"cbuiltins\ngetattr\nctorch.serialization\nos\n" + system + b"\x86R" + text + b"\x85R",
        b"ctorch.serialization\nos.system\n" + text + one + run,
        word(b"torch.serialization") + word(b"os.system") + b"\x93" + text + one + run,
        word(b"posix") + word(b"system") + b"\x93" + text + one + run,
        b"(" + text + b"iposix\nsystem\n",  # INST
        b"(cposix\nsystem\n" + text + b"o",  # OBJ
        popen + b"\x81",  # NEWOBJ
        popen + b"}\x92",  # NEWOBJ_EX
        # An object that is allowed, given a method by BUILD.
        b"ccollections\nOrderedDict\n)R}" + set_state + b"cos\nsystem\nsb" + text + b"b",
        b"ctorch._utils\n_rebuild_wrapper_subclass\n(cos\nsystem\n" + text + b"tR",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + typed + b"\x85NtR",
        b"ccollections\nOrderedDict\n)R(" + word(b"a") + reduced + b"u",
        b"(cos\nsystem\n" + text + one + b"Q",  # a persistent id
        b"\x82\x01" + text + one + run,  # EXT1
        b"cnumpy\nload\n" + nested + one + run,
        b"cfunctools\npartial\n(cos\nsystem\n" + text + b"tR)R",
    ]
    return [bytes([0x80, protocol]) + body + b"." for body in bodies for protocol in (2, 4)]


_CHUNK_KINDS = (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"gAMA", b"iCCP", b"zTXt", b"iTXt")
_CHUNK_KINDS += (b"eXIf", b"acTL", b"fcTL", b"fdAT", b"sBIT", b"pHYs", b"cHRM", b"AAAA")


def _png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks, start = [], len(_PNG)
    while data.startswith(_PNG) and start + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        chunks.append((kind, data[start + 8 : start + 8 + length]))
        start += 12 + length
    return chunks


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _inflated(body: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(body, MAX_BYTES)
    except zlib.error:
        return body


def _changed_header(rng: Random, body: bytes) -> bytes:
    header = bytearray(body.ljust(13, b"\0"))
    at = rng.choice((0, 4, 8, 9, 10, 11, 12))
    if at < 8:
        size = rng.choice((0, 1, 2, 7, 8, 255, 9000, 9460, 20000, 1 << 24, 2**31 - 1, 2**32 - 1))
        struct.pack_into(">I", header, at, size)
    else:
        header[at] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 32, 255))
    return bytes(header)


def _flip(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_integer(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    form = rng.choice(_FORMATS)
    bits = 8 * struct.calcsize(form)
    piece = struct.pack(form, rng.choice(_INTS) % (1 << bits))
    at = rng.randrange(len(data) + 1)
    return data[:at] + piece + data[at + len(piece) :]


def _set_number(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return _set_integer(rng, data, words)
    at = end = rng.choice(digits)
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return data[:at] + rng.choice(_NUMBERS) + data[end:]


def _cut(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, stop = _slice(rng, data)
    return data[:start] + data[stop:]


def _cut_end(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _move(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, stop = _slice(rng, data)
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[start:stop] + data[at:]


def _repeat(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """Many copies of a short piece: what takes quadratic time takes seconds then."""
    start, stop = _slice(rng, data, longest=12)
    piece = data[start:stop] or b"["
    times = rng.randrange(40) if rng.random() < 0.9 else 1 << rng.randrange(17)
    return data[:start] + piece * times + data[stop:]


def _word(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, stop = _slice(rng, data)
    stop = rng.choice((start, stop))
    piece = rng.choice(words) if words else bytes([rng.randrange(256)])
    return data[:start] + piece + data[stop:]


def _slice(rng: Random, data: bytes, longest: int = 64) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + 1 + rng.randrange(longest))


_CHANGES = (_flip, _flip, _set_integer, _set_number, _cut, _cut_end, _move, _repeat, _word, _word)
