// The one text that says what a model is: read as it is meant, and refused with the name of what is
// wrong, whatever is in it.
#include "core/description.h"

#include <algorithm>
#include <clocale>
#include <iterator>
#include <locale>
#include <random>
#include <string>
#include <vector>

#include "descriptions.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

namespace {

Description read(const std::string& text) { return read_description(text, "model.onnx"); }

void refused(const std::string& text, const std::string& words) {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, words, read(text));
}

// As "2.kv_scale 1x8 16+2": layer, name, heads x values, window and sinks.
std::vector<std::string> tensors(const std::string& text) {
  std::vector<std::string> all;
  for (const CacheTensor& t : cache_layout(read(text)).tensors) {
    all.push_back(std::to_string(t.layer) + "." + part_name(t) + " " + std::to_string(t.kv_heads) + "x" +
                  std::to_string(t.dim) + " " + std::to_string(t.window) + "+" +
                  std::to_string(t.sinks));
  }
  return all;
}

using Names = std::vector<std::string>;

// The C library's numbers, and those of new streams, with a comma.
class CommaLocale {
 public:
  CommaLocale() : c_(std::setlocale(LC_ALL, nullptr)) {
    struct Comma : std::numpunct<char> {
      char do_decimal_point() const override { return ','; }
      char do_thousands_sep() const override { return '.'; }
      std::string do_grouping() const override { return "\3"; }
    };
    before_ = std::locale::global(std::locale(std::locale::classic(), new Comma));
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8"}) {
      if (std::setlocale(LC_ALL, name)) break;  // where one is installed
    }
  }
  ~CommaLocale() {
    std::locale::global(before_);
    std::setlocale(LC_ALL, c_.c_str());
  }

 private:
  const std::string c_;
  std::locale before_;
};

}  // namespace

TEST(description, "every fact of a description is read") {
  const Description d =
      read(replaced(replaced(local_and_global("int8"), "learned_positions 0", "learned_positions 1"),
                    "cache_rows 0", "cache_rows 128"));
  EXPECT(d.vocab_size == 260 && d.max_positions == 96 && d.width == 32);
  EXPECT(d.cache == CacheType::kInt8 && d.learned_positions);
  EXPECT(d.weight_bits == 4 && d.block_size == 32 && d.matrix_bytes == 1000 && d.table_bytes == 2000);
  EXPECT(d.prefill_chunk == 0 && d.cache_rows == 128);
  EXPECT(d.layers() == 6 && d.kinds.size() == 2 && d.layer(4).name == "local");
  const LayerKind& local = d.layer(0);
  EXPECT(local.heads == 4 && local.kv_heads == 1 && local.head_dim == 8 && local.value_dim == 8);
  EXPECT(local.rows == Rows::kUnified && local.window == 16 && local.sinks == 2);
  EXPECT(local.positions == Positions::kRotaryConjugate && local.rotary_offset == 0);
  EXPECT((local.frequencies == std::vector<double>{1, 0.1, 0.01, 0.001}));
  EXPECT(local.mlp_width == 48 && local.mlp_matrices == 3);
  EXPECT(d.layer(5).name == "global" && d.layer(5).kv_heads == 2 && d.layer(5).window == 0);
  EXPECT(read(latent()).layer(1).rotary_offset == 12);
}

TEST(foreign_lines, "names that nobody here knows are somebody else's, of all layers and of a kind") {
  const Description d =
      read(replaced(replaced(uniform(), "operator 2\n", "operator 2\nexecutorch 1.5.1\nempty\n"),
                    "mlp_matrices 3\n", "mlp_matrices 3\nsoftcap 50.0\n"));
  EXPECT(d.layers() == 2);
}

TEST(layouts, "a session's tensors: by layer, of its own sizes, none for rows of another layer") {
  EXPECT((tensors(uniform()) == Names{"0.kv 1x8 0+0", "1.kv 1x8 0+0"}));
  EXPECT((tensors(uniform("int8")) ==
          Names{"0.kv 1x8 0+0", "0.kv_scale 1x8 0+0", "1.kv 1x8 0+0", "1.kv_scale 1x8 0+0"}));
  EXPECT((tensors(local_and_global()) == Names{"0.kv 1x8 16+2", "1.kv 1x8 16+2", "2.kv 1x8 16+2",
                                               "3.kv 1x8 16+2", "4.kv 1x8 16+2", "5.kv 2x16 0+0"}));
  EXPECT((tensors(latent()) == Names{"0.kv 1x20 0+0", "1.kv 1x20 0+0"}));
  // The rows of layer 2 are kept as far as its readers see.
  EXPECT(
      (tensors(shared_rows("int8")) ==
       Names{"0.kv 1x8 16+2", "0.kv_scale 1x8 16+2", "1.key 1x8 0+0", "1.value 1x12 0+0",
             "1.key_scale 1x8 0+0", "1.value_scale 1x12 0+0", "2.kv 1x8 24+2", "2.kv_scale 1x8 24+2"}));
  EXPECT((rows_from(read(shared_rows())) == std::vector<size_t>{0, 1, 2, 2, 1, 2}));
  // A reader that sees everything keeps everything.
  const std::string all = replaced(shared_rows(), "window 24\nsinks 2", "window 0\nsinks 0");
  EXPECT(tensors(all).back() == "2.kv 1x8 0+0");
}

TEST(token_bytes, "bytes of a token are those of every tensor, scales included") {
  EXPECT(cache_layout(read(local_and_global())).token_bytes() == 5 * 16 + 2 * 32);
  EXPECT(cache_layout(read(shared_rows("int8"))).token_bytes() == 2 * 10 + 10 + 14);
  const std::vector<Slab> slabs = cache_layout(read(local_and_global())).slabs();
  EXPECT(slabs.size() == 7 && slabs[6].tensor == 5 && slabs[6].head == 1);
}

TEST(live_rows, "rows that no later query sees are live no longer, the sinks and the margin are") {
  const CacheTensor all = {0, Part::kRow, false, 1, 8, 0, 0},
                    local = {0, Part::kRow, false, 1, 8, 16, 2};
  const auto is = [](const LiveRows& rows, int64_t sinks, int64_t first, int64_t length) {
    return rows.sinks == sinks && rows.first == first && rows.length == length;
  };
  EXPECT(is(live_rows(all, 1000, 5), 0, 0, 1000) && is(visible_rows(all, 1000), 0, 0, 1000));
  EXPECT(is(live_rows(local, 100, 0), 2, 68, 100));  // a margin of one more window
  EXPECT(is(live_rows(local, 100, 4), 2, 80, 100));
  EXPECT(is(visible_rows(local, 100), 2, 85, 100));  // and the one that is written next
  EXPECT(live_rows(local, 100, 4).count() == 22);
  for (int64_t length = 0; length <= 34; ++length) EXPECT(is(live_rows(local, length, 0), 0, 0, length));
  EXPECT(is(live_rows(local, 35, 0), 2, 3, 35));
  EXPECT(is(live_rows(local, 1000, INT64_MAX), 0, 0, 1000));
}

TEST(comma, "decimal numbers are read the same under a locale with a comma") {
  const auto precise = replaced(uniform(), "frequencies 1 0.1 0.01 1e-3",
                                "frequencies 0.5 0.15848931924611134 1E-2 +1.5e-05");
  const std::vector<double> expected = {0.5, 0.15848931924611134, 0.01, 1.5e-05};
  EXPECT(read(precise).kinds[0].frequencies == expected);
  const CommaLocale comma;
  EXPECT(read(precise).kinds[0].frequencies == expected);
  EXPECT(read(precise).max_positions == 96);
  refused(replaced(uniform(), "0.1", "0,1"), "\"0,1\" in frequencies of the kind layer");
  refused(replaced(uniform(), "max_positions 96", "max_positions 9.600"), "\"9.600\" as max_positions");
}

TEST(bad_decimals, "frequencies that are no numbers, or no rotation, are named") {
  for (const char* bad : {"x", "nan", "inf", "-1", "1e", "0x1", "1e999", "1.2.3", "--1", "1001", "1f"}) {
    refused(replaced(uniform(), "0.01", bad), "\"" + std::string(bad) + "\" in frequencies of the kind");
  }
  const auto frequencies = [](const std::string& line) {
    return replaced(uniform(), "frequencies 1 0.1 0.01 1e-3\n", line);
  };
  EXPECT(read(frequencies("frequencies 0 0\n")).kinds[0].frequencies.size() == 2);
  refused(frequencies(""), "0 as number of frequencies");
  refused(frequencies("frequencies\n"), "0 as number of frequencies");
  refused(frequencies("frequencies \n"), "0 as number of frequencies");
  refused(frequencies("frequencies 1 1 1 1 1\n"), "5 as number of frequencies");
  refused(replaced(uniform(), "rotary_offset 0", "rotary_offset 1"), "4 as number of frequencies");
  refused(replaced(uniform(), "rotary-conjugate", "none"), "4 as number of frequencies");
  EXPECT(read(replaced(frequencies("frequencies\n"), "rotary-conjugate", "none")).layers() == 2);
}

TEST(missing_lines, "each line that a description lacks is named") {
  const std::string whole = uniform();
  for (size_t at = 0; at < whole.size();) {
    const size_t end = whole.find('\n', at) + 1;
    const std::string name = whole.substr(at, whole.find_first_of(" \n", at) - at);
    const std::string without = whole.substr(0, at) + whole.substr(end);
    const std::string empty = whole.substr(0, at) + name + "\n" + whole.substr(end);
    at = end;
    if (name == "frequencies") continue;
    for (const std::string& text : {without, empty}) {
      try {
        read(text);
        EXPECT(false);
      } catch (const Error& error) {
        const std::string sentence = error.what();
        EXPECT(error.status() == EQKV_BAD_PACKAGE && sentence.rfind("model.onnx: ", 0) == 0);
        // Without its kind line, a kind's are lines about all layers.
        EXPECT(sentence.find(name) != std::string::npos || name == "kind");
      }
    }
  }
}

TEST(bad_numbers, "numbers out of range are refused with their line, their text and their range") {
  const struct {
    const char *line, *bad;
  } kCases[] = {{"vocab_size 260", "0"},
                {"vocab_size 260", "16777217"},
                {"max_positions 96", "-1"},
                {"max_positions 96", "2147483649"},
                {"width 32", "1048577"},
                {"width 32", "99999999999999999999"},
                {"width 32", "32 "},
                {"width 32", " 32"},
                {"width 32", "3x"},
                {"width 32", "+32"},
                {"learned_positions 0", "2"},
                {"block_size 32", "4097"},
                {"matrix_bytes 1000", "-5"},
                {"table_bytes 2000", "1125899906842625"},
                {"prefill_chunk 0", "1048577"},
                {"cache_rows 0", "95"},
                {"heads 4", "4097"},
                {"kv_heads 1", "5"},
                {"kv_heads 1", "3"},
                {"head_dim 8", "65537"},
                {"value_dim 8", "0"},
                {"value_dim 8", "9"},
                {"window 0", "97"},
                {"sinks 0", "1"},
                {"rotary_offset 0", "8"},
                {"mlp_width 48", "0"},
                {"mlp_matrices 3", "4"},
                {"weight_bits 4", "5"},
                {"cache fp16", "fp8"},
                {"rows unified", "Unified"},
                {"positions rotary-conjugate", "learned"}};
  for (const auto& c : kCases) {
    const std::string line = c.line, name = line.substr(0, line.find(' ') + 1);
    refused(replaced(uniform(), "\n" + line + "\n", "\n" + name + c.bad + "\n"),
            "\"" + std::string(c.bad) + "\" as " + name.substr(0, name.size() - 1));
  }
}

TEST(bad_rows, "rows of another kind must be there, be its own and have the same sizes") {
  const std::string of = "rows of own\n";
  refused(replaced(shared_rows(), of, "rows of absent\n"), "\"of absent\" as rows of the kind reader");
  refused(replaced(shared_rows(), of, "rows of\n"), "\"of\" as rows of the kind reader");
  refused(replaced(shared_rows(), of, "rows of reader\n"), "a kind that has its own");
  refused(replaced(shared_rows(), of, "rows of apart_reader\n"), "a kind that has its own");
  refused(replaced(shared_rows(), of, "rows of apart\n"), "kv_heads, head_dim and value_dim");
  refused(replaced(shared_rows(), "pattern own apart", "pattern reader apart"),
          "layer 0 read rows of the kind own, of which no layer is before it");
  refused(replaced(shared_rows(), "pattern own", "pattern other"), "layer 0 of the kind \"other\"");
  // What is rotated is all of it a part of the value, or none.
  refused(replaced(latent(), "rotary_offset 12", "rotary_offset 8"),
          "\"8\" as rotary_offset of the kind");
  EXPECT(read(replaced(latent(), "rotary_offset 12", "rotary_offset 4")).layers() == 2);
}

TEST(bad_text, "what is no description, is cut off or too long is refused") {
  refused("", "cut off");
  refused("format 3", "cut off");
  refused("vocab_size 3\nformat 3\n", "does not begin with its format");
  refused("format 2\n", "older edge-qkv; export the model again");
  refused("format 4\nanything \x7f else\n", "newer edge-qkv (format 4, this one reads 3)");
  refused(replaced(uniform(), "operator 2", "operator 3"), "newer edge-qkv (operator 3");
  refused(replaced(uniform(), "operator 2", "operator 1"), "older edge-qkv");
  refused(uniform() + "more 1\n", "after its pattern");
  refused(uniform() + "\n", "no name and value");
  refused(replaced(uniform(), "width 32", "width 32\nwidth 32"), "two lines width");
  refused(replaced(uniform(), "heads 4", "heads 4\nheads 4"), "two lines heads of the kind layer");
  refused(replaced(uniform(), "heads 4", "heads 4\nHeads 4"), "(\"Heads 4\")");
  refused(replaced(uniform(), "heads 4", "heads 4\nx \xc3\xa9"), "(\"x ??\")");
  refused(replaced(uniform(), "heads 4", std::string("heads 4\nx \0y", 12)), "(\"x ?y\")");
  refused(replaced(uniform(), "kind layer", "kind two words"), "must be one word");
  refused(replaced(uniform(), "kind layer", "kind " + std::string(41, 'x')), "must be one word");
  refused(all_layers() + kind_of_layer("a") + kind_of_layer("a") + "pattern a\n", "two kinds named a");
  refused(all_layers() + "pattern\n", "pattern");
  refused(all_layers() + kind_of_layer("a") + "pattern  \n", "layers in its pattern");
  std::string kinds = all_layers(), layers = all_layers() + kind_of_layer("a") + "pattern";
  for (int i = 0; i < 65; ++i) kinds += "kind k" + std::to_string(i) + "\n";
  for (int i = 0; i < 4097; ++i) layers += " a";
  refused(kinds + "pattern k0\n", "more than 64 kinds");
  refused(layers + "\n", "more than 4096 layers");
  refused(replaced(replaced(layers, "heads 4", "heads 4096"), "kv_heads 1", "kv_heads 4096") + "\n",
          "more than 1048576 kv_heads in all layers");
  refused(replaced(uniform(), "operator 2", "operator 2\nnote " + std::string(1 << 16, 'x')),
          "more than 65536 bytes");
  const std::string hostile = replaced(uniform(), "width 32", "width " + std::string(5000, '7'));
  try {
    read(hostile);
    EXPECT(false);
  } catch (const Error& error) {
    EXPECT(std::string(error.what()).size() < 200);  // short, whatever the file holds
  }
}

// Bytes, lines and numbers of sound texts, exchanged at random.
TEST(mutated, "whatever becomes of a description, it is read or refused with one printable sentence") {
  std::mt19937 random(11);
  const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
  const std::string pieces[] = {
      "0",      "-1",       "4096", "2147483648", "1e308",      "9223372036854775807",
      "of own", "separate", "\n",   " ",          "kind own\n", "pattern own\n",
      "int8",   "\xff"};
  size_t read_well = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string texts[] = {uniform(), local_and_global("int8"), latent(), shared_rows()};
    std::string text = texts[below(4)];
    for (size_t changes = 1 + below(3); changes > 0; --changes) {
      const size_t at = below(text.size()), count = std::min(below(12), text.size() - at);
      switch (below(4)) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.replace(at, count, pieces[below(std::size(pieces))]);
          break;
        case 2: {  // a line comes twice, somewhere
          const size_t begin = text.rfind('\n', at) == std::string::npos ? 0 : text.rfind('\n', at) + 1;
          const std::string line = text.substr(begin, text.find('\n', at) - begin) + "\n";
          const size_t to = text.find('\n', below(text.size()));
          text.insert(to == std::string::npos ? 0 : to + 1, line);
          break;
        }
        default: {  // the digits of a number become others
          const size_t digit = text.find_first_of("0123456789", at);
          if (digit != std::string::npos) text.replace(digit, 1, std::to_string(random() % 5000));
        }
      }
      if (text.empty()) text = "\n";
    }
    try {
      const Description d = read(text);
      const CacheLayout layout = cache_layout(d);
      EXPECT(layout.token_bytes() > 0 && layout.tensors.size() <= 4 * d.pattern.size());
      for (const CacheTensor& tensor : layout.tensors) EXPECT(tensor.kv_heads > 0 && tensor.dim > 0);
      EXPECT(rows_from(d).size() == d.pattern.size());
      ++read_well;
    } catch (const Error& error) {
      const std::string sentence = error.what();
      EXPECT(error.status() == EQKV_BAD_PACKAGE && sentence.size() < 400);
      for (const char c : sentence) EXPECT(c >= 0x20 && c < 0x7f);
    }
  }
  EXPECT(read_well > 100);  // not all of it is noise
}
