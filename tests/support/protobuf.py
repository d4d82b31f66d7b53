def field(number: int, contents: bytes, padding: int = 0) -> bytes:
    """A field with a length on the wire, spelled with more bytes than necessary."""
    length, rest = bytearray(), len(contents)
    while rest or not length:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length += b"\x80" * padding
    length[-1] &= 0x7F
    return bytes([number << 3 | 2]) + length + contents
