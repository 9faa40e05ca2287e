// Text from anywhere (a file, an engine, the system) as text that any binding can show.
#pragma once

#include <cstddef>
#include <cstring>

namespace edge_qkv {

// Bytes of the well-formed UTF-8 character at `text`, 0 where there is none (Unicode 15, table 3-7).
inline size_t utf8_length(const unsigned char* text) {
  const unsigned char lead = text[0];
  if (lead < 0x80) return lead ? 1 : 0;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (text[1] < low || text[1] > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (text[i] < 0x80 || text[i] > 0xbf) return 0;
  }
  return length;
}

// Copies `text` to out [size], cut at a whole character, with a question mark for each byte that is not
// UTF-8 and for each control character. Java, for one, aborts on anything else.
inline void copy_message(const char* text, char* out, size_t size) {
  const auto* in = reinterpret_cast<const unsigned char*>(text);
  size_t used = 0;
  while (*in) {
    const size_t length = utf8_length(in);
    const bool plain = length > 1 || (length == 1 && *in >= 0x20 && *in != 0x7f);
    const size_t bytes = plain ? length : 1;
    if (used + bytes >= size) break;
    if (plain) {
      std::memcpy(out + used, in, bytes);
    } else {
      out[used] = *in == '\n' || *in == '\t' ? ' ' : '?';
    }
    used += bytes;
    in += bytes;
  }
  out[used] = '\0';
}

}  // namespace edge_qkv
