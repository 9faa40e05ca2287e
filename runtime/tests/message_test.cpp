// Messages are UTF-8 whatever they were made of.
#include "core/message.h"

#include <string>

#include "test.h"

using namespace edge_qkv;

namespace {

std::string message(const std::string& text, size_t size = 100) {
  std::string out(size, 'x');
  copy_message(text.c_str(), out.data(), size);
  return out.c_str();
}

}  // namespace

TEST(well_formed, "well-formed text stays as it is") {
  for (const char* text :
       {"", "plain", "Grüße", "日本語", "😀 end", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"}) {
    EXPECT(message(text) == text);
  }
}

TEST(ill_formed, "every byte that is not UTF-8 becomes a question mark") {
  EXPECT(message("a\xff"
                 "b") == "a?b");
  EXPECT(message("\xc0\x80") == "??");            // overlong
  EXPECT(message("\xe0\x80\x80") == "???");       // overlong
  EXPECT(message("\xed\xa0\x80") == "???");       // a surrogate
  EXPECT(message("\xf4\x90\x80\x80") == "????");  // beyond U+10FFFF
  EXPECT(message("\xe6\x97") == "??");            // ends early
  EXPECT(message("\xe6\x97"
                 "z") == "??z");
}

TEST(control, "control characters cannot reach a terminal") {
  EXPECT(message("a\x1b[31mb\nc\td\x7f") == "a?[31mb c d?");
}

TEST(cut, "long text is cut at a whole character") {
  EXPECT(message("abcdef", 4) == "abc");
  EXPECT(message("ab日本", 6) == "ab日");
  EXPECT(message("ab日本", 5) == "ab");
  EXPECT(message("abc", 1).empty());
}
