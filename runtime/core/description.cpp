#include "description.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <locale>
#include <map>
#include <set>
#include <sstream>

#include "error.h"

namespace edge_qkv {
namespace {

constexpr int64_t kFormat = 3, kOperator = 2;
constexpr size_t kMostBytes = 1 << 16, kMostKinds = 64, kMostLayers = 1 << 12, kMostNameBytes = 40;
// Bounds far above any model that exists, and far below what overflows.
constexpr int64_t kMostWeightBytes = int64_t{1} << 50, kMostRows = int64_t{1} << 31;
constexpr int64_t kMostHeads = 1 << 12, kMostDim = 1 << 16, kMostWidth = 1 << 20;
constexpr int64_t kMostVocabulary = 1 << 24, kMostBlock = 1 << 12;
constexpr double kMostFrequency = 1000;
constexpr int64_t kMostCachedHeads = 1 << 20;  // of all layers

// Text of a file in a message: short, and no control characters.
std::string printable(const std::string& text) {
  std::string out = text.substr(0, kMostNameBytes);
  std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; }, '?');
  return out;
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> found;
  for (size_t at = 0; (at = text.find_first_not_of(' ', at)) != std::string::npos;) {
    const size_t end = std::min(text.find(' ', at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end;
  }
  return found;
}

bool read_integer(const std::string& text, int64_t* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

// With a point, whatever the process's locale has.
bool read_decimal(const std::string& text, double* value) {
  if (text.find_first_not_of("0123456789.eE+-") != std::string::npos) return false;
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  return in >> *value && in.peek() == std::istringstream::traits_type::eof();
}

// The lines about all layers, or about a kind of them.
class Section {
 public:
  Section(std::string source, eqkv_status status, std::string kind)
      : source_(std::move(source)), status_(status), kind_(std::move(kind)) {}

  [[noreturn]] void refuse(const std::string& why) const { throw Error(status_, source_ + ": " + why); }

  const std::string& kind() const { return kind_; }
  bool add(const std::string& name, const std::string& value) {
    return lines_.emplace(name, value).second;
  }
  bool has(const std::string& name) const { return lines_.count(name) > 0; }

  std::string text(const std::string& name) const {
    const auto found = lines_.find(name);
    if (found != lines_.end() && !found->second.empty()) return found->second;
    refuse("its description lacks " + line(name) + "; export the model again.");
  }

  // An integer in [least, most].
  int64_t number(const std::string& name, int64_t most, int64_t least = 1) const {
    const std::string given = text(name);
    int64_t value = 0;
    if (read_integer(given, &value) && value >= least && value <= most) return value;
    refuse_value(name, "a number from " + std::to_string(least) + " to " + std::to_string(most));
  }

  // An index into `choices`.
  template <size_t N>
  int choice(const std::string& name, const char* const (&choices)[N]) const {
    const auto found = std::find(choices, choices + N, text(name));
    if (found != choices + N) return static_cast<int>(found - choices);
    std::string all = choices[0];
    for (size_t i = 1; i < N; ++i) all += (i + 1 < N ? ", " : " or ") + std::string(choices[i]);
    refuse_value(name, all);
  }

  std::vector<double> decimals(const std::string& name) const {
    std::vector<double> values;
    if (!has(name)) return values;
    for (const std::string& word : words(lines_.at(name))) {
      double value = 0;
      if (!read_decimal(word, &value) || !(value >= 0 && value <= kMostFrequency)) {
        refuse("its description has \"" + printable(word) + "\" in " + line(name) +
               ", which must be decimal numbers from 0 to 1000.");
      }
      values.push_back(value);
    }
    return values;
  }

  // As in "heads of the kind local".
  std::string line(const std::string& name) const {
    return kind_.empty() ? name : name + " of the kind " + printable(kind_);
  }

  [[noreturn]] void refuse_value(const std::string& name, const std::string& wanted) const {
    refuse("its description has \"" + printable(text(name)) + "\" as " + line(name) +
           ", which must be " + wanted + ".");
  }

  void check_version(const std::string& name, int64_t ours) const {
    const int64_t theirs = number(name, 1'000'000);
    if (theirs < ours) refuse("was written by an older edge-qkv; export the model again.");
    if (theirs > ours) {
      refuse("was written by a newer edge-qkv (" + name + " " + std::to_string(theirs) +
             ", this one reads " + std::to_string(ours) +
             "); install that version or export the model again.");
    }
  }

 private:
  std::string source_;
  eqkv_status status_;
  std::string kind_;
  std::map<std::string, std::string> lines_;
};

// The lines about all layers, then those about each kind.
std::vector<Section> read_sections(const std::string& text, const std::string& source,
                                   eqkv_status status) {
  std::vector<Section> sections = {Section(source, status, "")};
  const auto refuse = [&](const std::string& why) { sections[0].refuse("its description " + why); };
  if (text.size() > kMostBytes) refuse("has more than " + std::to_string(kMostBytes) + " bytes.");
  if (text.empty() || text.back() != '\n') refuse("is cut off; export the model again.");
  std::set<std::string> kinds;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at), space = std::min(text.find(' ', at), end);
    const std::string name = text.substr(at, space - at);
    const std::string value = space < end ? text.substr(space + 1, end - space - 1) : "";
    const auto plain = [](unsigned char c) { return c >= 0x20 && c < 0x7f; };
    if (name.empty() || name.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") != std::string::npos ||
        !std::all_of(value.begin(), value.end(), plain)) {
      refuse("has a line that is no name and value (\"" + printable(text.substr(at, end - at)) +
             "\"); export the model again.");
    }
    if (at == 0) {  // of another version nothing else is known
      if (name != "format") refuse("does not begin with its format; export the model again.");
      sections[0].add(name, value);
      sections[0].check_version(name, kFormat);
    } else if (sections[0].has("pattern")) {
      refuse("goes on after its pattern; export the model again.");
    } else if (name == "kind") {
      if (value.empty() || value.size() > kMostNameBytes || value.find(' ') != std::string::npos) {
        refuse("has a kind named \"" + printable(value) + "\", which must be one word.");
      }
      if (!kinds.insert(value).second) refuse("has two kinds named " + value + ".");
      if (kinds.size() > kMostKinds) refuse("has more than " + std::to_string(kMostKinds) + " kinds.");
      sections.emplace_back(source, status, value);
    } else if (Section& section = name == "pattern" ? sections[0] : sections.back();
               !section.add(name, value)) {
      refuse("has two lines " + section.line(printable(name)) + ".");
    }
    at = end + 1;
  }
  return sections;
}

void read_model(const Section& lines, Description* d) {
  constexpr const char* kTypes[] = {"fp32", "fp16", "int8"};  // CacheType
  constexpr const char* kWeightBits[] = {"4", "8", "16", "32"};
  constexpr int kBits[] = {4, 8, 16, 32};
  lines.check_version("operator", kOperator);
  d->vocab_size = lines.number("vocab_size", kMostVocabulary);
  d->max_positions = lines.number("max_positions", kMostRows);
  d->width = lines.number("width", kMostWidth);
  d->cache = static_cast<CacheType>(lines.choice("cache", kTypes));
  d->learned_positions = lines.number("learned_positions", 1, 0) == 1;
  d->weight_bits = kBits[lines.choice("weight_bits", kWeightBits)];
  d->block_size = static_cast<int>(lines.number("block_size", kMostBlock, 0));
  d->matrix_bytes = static_cast<uint64_t>(lines.number("matrix_bytes", kMostWeightBytes, 0));
  d->table_bytes = static_cast<uint64_t>(lines.number("table_bytes", kMostWeightBytes, 0));
  d->prefill_chunk = lines.number("prefill_chunk", kMostChunk, 0);
  d->cache_rows = lines.number("cache_rows", kMostRows, 0);
  if (d->cache_rows > 0 && d->cache_rows < d->max_positions) {
    lines.refuse_value("cache_rows", "0 or at least its max_positions");
  }
}

// Sets also the name of the kind whose rows it reads, or leaves it empty.
LayerKind read_kind(const Section& lines, int64_t max_positions, std::string* rows_of) {
  constexpr const char* kRows[] = {"unified", "separate"};
  constexpr const char* kPositions[] = {"none", "rotary-conjugate", "rotary-on-read"};
  constexpr const char* kOf = "of ";
  LayerKind kind;
  kind.name = lines.kind();
  kind.heads = lines.number("heads", kMostHeads);
  kind.kv_heads = lines.number("kv_heads", kind.heads);
  if (kind.heads % kind.kv_heads != 0) lines.refuse_value("kv_heads", "a divisor of its heads");
  kind.head_dim = lines.number("head_dim", kMostDim);
  kind.value_dim = lines.number("value_dim", kMostDim);
  if (const std::string rows = lines.text("rows"); rows.rfind(kOf, 0) == 0) {
    kind.rows = Rows::kOther;
    *rows_of = rows.substr(std::strlen(kOf));
  } else {
    kind.rows = static_cast<Rows>(lines.choice("rows", kRows));
  }
  kind.window = lines.number("window", max_positions, 0);
  kind.sinks = lines.number("sinks", kind.window == 0 ? 0 : max_positions, 0);
  kind.positions = static_cast<Positions>(lines.choice("positions", kPositions));
  kind.rotary_offset = lines.number("rotary_offset", kind.head_dim - 1, 0);
  kind.frequencies = lines.decimals("frequencies");
  const int64_t rotary_dim = 2 * static_cast<int64_t>(kind.frequencies.size());
  const bool rotary = kind.positions != Positions::kNone;
  if (rotary != (rotary_dim > 0) || kind.rotary_offset + rotary_dim > kind.head_dim) {
    lines.refuse("its description has " + std::to_string(kind.frequencies.size()) + " as number of " +
                 lines.line("frequencies") +
                 ", which its positions, rotary_offset and head_dim do not " +
                 "allow; export the model again.");
  }
  kind.mlp_width = lines.number("mlp_width", kMostWidth);
  kind.mlp_matrices = lines.number("mlp_matrices", 3, 2);
  return kind;
}

// That the kernel can compute a layer of this kind, whose rows are those of the kind `from`.
void check_rows(const Section& lines, const LayerKind& kind, const LayerKind& from) {
  if (from.rows == Rows::kOther) lines.refuse_value("rows", "of a kind that has its own");
  const bool unified = from.rows == Rows::kUnified;
  const bool values_fit = unified ? kind.value_dim <= kind.head_dim : kind.value_dim == from.value_dim;
  const bool other = kind.rows == Rows::kOther;
  if (other && (kind.kv_heads != from.kv_heads || kind.head_dim != from.head_dim || !values_fit)) {
    lines.refuse_value("rows", "of a kind with its kv_heads, head_dim and value_dim");
  }
  if (unified && !values_fit) {
    lines.refuse_value("value_dim", "at most its head_dim, for a value is a part of a row");
  }
  const int64_t end = kind.rotary_offset + 2 * static_cast<int64_t>(kind.frequencies.size());
  if (unified && kind.positions == Positions::kRotaryConjugate && kind.rotary_offset < kind.value_dim &&
      end > kind.value_dim) {
    lines.refuse_value("rotary_offset", "so that all or none of what is rotated is a part of the value");
  }
}

}  // namespace

Description read_description(const std::string& text, const std::string& source, eqkv_status status) {
  const std::vector<Section> sections = read_sections(text, source, status);
  const Section& model = sections[0];
  Description d;
  read_model(model, &d);
  std::vector<std::string> rows_of(sections.size());
  std::map<std::string, size_t> by_name;
  for (size_t i = 1; i < sections.size(); ++i) {
    d.kinds.push_back(read_kind(sections[i], d.max_positions, &rows_of[i]));
    by_name.emplace(d.kinds.back().name, i - 1);
  }
  for (size_t i = 1; i < sections.size(); ++i) {
    LayerKind& kind = d.kinds[i - 1];
    if (kind.rows == Rows::kOther) {
      const auto found = by_name.find(rows_of[i]);
      if (found == by_name.end()) sections[i].refuse_value("rows", "of a kind that it describes");
      kind.rows_of = found->second;
    }
    check_rows(sections[i], kind, kind.rows == Rows::kOther ? d.kinds[kind.rows_of] : kind);
  }
  std::vector<bool> seen(d.kinds.size());
  int64_t cached_heads = 0;
  for (const std::string& word : words(model.text("pattern"))) {
    const auto found = by_name.find(word);
    const std::string layer = "layer " + std::to_string(d.pattern.size());
    if (found == by_name.end()) {
      model.refuse("its description has " + layer + " of the kind \"" + printable(word) +
                   "\", which it does not describe.");
    }
    const LayerKind& kind = d.kinds[found->second];
    if (kind.rows == Rows::kOther && !seen[kind.rows_of]) {
      model.refuse("its description has " + layer + " read rows of the kind " +
                   d.kinds[kind.rows_of].name + ", of which no layer is before it.");
    }
    seen[found->second] = true;
    d.pattern.push_back(found->second);
    if (d.pattern.size() > kMostLayers) {
      model.refuse("its description has more than " + std::to_string(kMostLayers) + " layers.");
    }
    cached_heads += kind.rows == Rows::kOther ? 0 : kind.kv_heads;
    if (cached_heads > kMostCachedHeads) {
      model.refuse("its description has more than " + std::to_string(kMostCachedHeads) +
                   " kv_heads in all layers.");
    }
  }
  if (d.pattern.empty()) model.refuse("its description lacks layers in its pattern.");
  return d;
}

std::vector<size_t> rows_from(const Description& description) {
  std::vector<size_t> from, last(description.kinds.size());
  for (size_t i = 0; i < description.pattern.size(); ++i) {
    const LayerKind& kind = description.layer(i);
    from.push_back(kind.rows == Rows::kOther ? last[kind.rows_of] : i);
    last[description.pattern[i]] = i;
  }
  return from;
}

CacheLayout cache_layout(const Description& description) {
  const std::vector<size_t> from = rows_from(description);
  // Of each layer's rows: what it and its readers see.
  struct Sight {
    int64_t window, sinks;
  };
  std::vector<Sight> seen;
  for (size_t i = 0; i < from.size(); ++i) {
    const LayerKind& kind = description.layer(i);
    seen.push_back({kind.window, kind.sinks});
    Sight& sight = seen[from[i]];
    const bool all = sight.window == 0 || kind.window == 0;
    sight.window = all ? 0 : std::max(sight.window, kind.window);
    sight.sinks = all ? 0 : std::max(sight.sinks, kind.sinks);
  }
  CacheLayout layout;
  layout.type = description.cache;
  for (size_t i = 0; i < from.size(); ++i) {
    const LayerKind& kind = description.layer(i);
    if (from[i] != i) continue;
    std::vector<CacheTensor> rows;
    const auto add = [&](Part part, int64_t dim) {
      rows.push_back(
          {static_cast<int64_t>(i), part, false, kind.kv_heads, dim, seen[i].window, seen[i].sinks});
    };
    if (kind.rows == Rows::kUnified) {
      add(Part::kRow, kind.head_dim);
    } else {
      add(Part::kKey, kind.head_dim);
      add(Part::kValue, kind.value_dim);
    }
    layout.tensors.insert(layout.tensors.end(), rows.begin(), rows.end());
    if (cache_type_info(layout.type).scale_bytes == 0) continue;
    for (CacheTensor& tensor : rows) tensor.scales = true;
    layout.tensors.insert(layout.tensors.end(), rows.begin(), rows.end());
  }
  return layout;
}

}  // namespace edge_qkv
