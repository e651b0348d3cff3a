// A backend in a program of its own: paged attention over candidates, in plain loops and double precision.
//
// It speaks the exec protocol of attnconform (conformance/exec/PROTOCOL.md) and uses nothing but the standard library.
// It knows candidates, causal masks and windows, a scale, lse, and gradients; it declares the rest unsupported.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// -- JSON: just enough to read a message and the header of a safetensors file ---------------------------------------

struct Json {
    enum Kind { Null, Bool, Number, String, Array, Object } kind = Null;
    bool truth = false;
    double number = 0;
    std::string text;
    std::vector<Json> items;
    std::map<std::string, Json> fields;

    bool is_null() const { return kind == Null; }
    bool has(const std::string& name) const { return fields.count(name) && !fields.at(name).is_null(); }
    const Json& operator[](const std::string& name) const {
        auto found = fields.find(name);
        if (found == fields.end()) throw std::runtime_error("the message has no field " + name);
        return found->second;
    }
    int64_t integer() const { return static_cast<int64_t>(number); }
};

class Parser {
  public:
    explicit Parser(const std::string& text) : text_(text) {}

    Json parse() {
        Json value = parse_value();
        skip_space();
        if (at_ != text_.size()) throw std::runtime_error("text after the end of a JSON value");
        return value;
    }

  private:
    const std::string& text_;
    size_t at_ = 0;

    void skip_space() {
        while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    }
    char peek() {
        skip_space();
        if (at_ >= text_.size()) throw std::runtime_error("a JSON value ends too early");
        return text_[at_];
    }
    void expect(char wanted) {
        if (peek() != wanted) throw std::runtime_error(std::string("JSON lacks a ") + wanted);
        ++at_;
    }
    bool take(const std::string& word) {
        if (text_.compare(at_, word.size(), word) != 0) return false;
        at_ += word.size();
        return true;
    }

    Json parse_value() {
        Json value;
        switch (peek()) {
            case '{':
                value.kind = Json::Object;
                ++at_;
                while (peek() != '}') {
                    std::string name = parse_string();
                    expect(':');
                    value.fields[name] = parse_value();
                    if (peek() == ',') ++at_;
                }
                ++at_;
                return value;
            case '[':
                value.kind = Json::Array;
                ++at_;
                while (peek() != ']') {
                    value.items.push_back(parse_value());
                    if (peek() == ',') ++at_;
                }
                ++at_;
                return value;
            case '"':
                value.kind = Json::String;
                value.text = parse_string();
                return value;
            default:
                return parse_word();
        }
    }

    Json parse_word() {
        Json value;
        if (take("null")) return value;
        value.kind = Json::Bool;
        if (take("true")) {
            value.truth = true;
            return value;
        }
        if (take("false")) return value;
        size_t length = 0;
        value.kind = Json::Number;
        value.number = std::stod(text_.substr(at_, 40), &length);
        at_ += length;
        return value;
    }

    std::string parse_string() {
        expect('"');
        std::string out;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] != '\\') {
                out += text_[at_++];
                continue;
            }
            char escaped = text_.at(at_ + 1);
            at_ += 2;
            if (escaped == 'u') {  // only names and paths travel: one byte is enough
                out += static_cast<char>(std::stoi(text_.substr(at_, 4), nullptr, 16));
                at_ += 4;
            } else {
                out += escaped == 'n' ? '\n' : escaped == 't' ? '\t' : escaped;
            }
        }
        expect('"');
        return out;
    }
};

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += (c == '\n' || c == '\r' || c == '\t') ? ' ' : c;
    }
    return out + "\"";
}

// -- safetensors: 8 bytes of length, a JSON header, the data ---------------------------------------------------------

struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;

    int64_t size() const {
        int64_t n = 1;
        for (int64_t extent : shape) n *= extent;
        return n;
    }
    int64_t integer(int64_t i) const {
        int64_t value;
        std::memcpy(&value, bytes.data() + 8 * i, 8);
        return value;
    }
};

using Tensors = std::map<std::string, Tensor>;

Tensors read_tensors(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    uint64_t length = 0;
    if (!file.read(reinterpret_cast<char*>(&length), 8)) throw std::runtime_error("cannot read " + path);
    std::string header(length, ' ');
    file.read(header.data(), static_cast<std::streamsize>(length));
    std::ostringstream rest;
    rest << file.rdbuf();
    const std::string data = rest.str();
    Tensors tensors;
    for (const auto& [name, entry] : Parser(header).parse().fields) {
        if (name == "__metadata__") continue;
        Tensor& tensor = tensors[name];
        tensor.dtype = entry["dtype"].text;
        for (const Json& extent : entry["shape"].items) tensor.shape.push_back(extent.integer());
        const auto& range = entry["data_offsets"].items;
        const size_t begin = range.at(0).integer(), end = range.at(1).integer();
        if (end > data.size() || begin > end) throw std::runtime_error(name + " lies outside its file");
        tensor.bytes.assign(data.begin() + begin, data.begin() + end);
    }
    return tensors;
}

void write_tensors(const std::string& path, const Tensors& tensors) {
    std::ostringstream header;
    size_t offset = 0;
    for (const auto& [name, tensor] : tensors) {
        header << (offset || &tensor != &tensors.begin()->second ? "," : "{") << quoted(name)
               << ":{\"dtype\":" << quoted(tensor.dtype) << ",\"shape\":[";
        for (size_t i = 0; i < tensor.shape.size(); ++i) header << (i ? "," : "") << tensor.shape[i];
        header << "],\"data_offsets\":[" << offset << "," << offset + tensor.bytes.size() << "]}";
        offset += tensor.bytes.size();
    }
    std::string text = header.str() + "}";
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t length = text.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8).write(text.data(), static_cast<std::streamsize>(length));
    for (const auto& [name, tensor] : tensors) {
        file.write(tensor.bytes.data(), static_cast<std::streamsize>(tensor.bytes.size()));
    }
    if (!file) throw std::runtime_error("cannot write " + path);
}

// -- numbers ---------------------------------------------------------------------------------------------------------

double half_to_double(uint16_t bits) {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    return sign * (exponent ? std::ldexp(1024.0 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

// Rounds to nearest, ties to even, once, into a format of so many bits of mantissa and exponent.
uint16_t round_to_16(double value, int mantissa_bits, int exponent_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<uint16_t>(sign | (top << mantissa_bits) | 1 << (mantissa_bits - 1));
    const double size = std::fabs(value);
    if (size == 0) return sign;
    int exponent = std::isinf(size) ? top : std::max(std::ilogb(size), 1 - bias);
    if (exponent <= bias) {
        double steps = std::nearbyint(std::ldexp(size, mantissa_bits - exponent));
        if (steps == std::ldexp(1.0, mantissa_bits + 1)) {
            steps /= 2;
            ++exponent;
        }
        if (exponent <= bias) {
            const bool is_normal = steps >= std::ldexp(1.0, mantissa_bits);
            const int field = is_normal ? exponent + bias : 0;
            const auto kept = static_cast<int64_t>(steps) & ((1 << mantissa_bits) - 1);
            return static_cast<uint16_t>(sign | (field << mantissa_bits) | kept);
        }
    }
    return static_cast<uint16_t>(sign | (top << mantissa_bits));
}

std::vector<double> numbers(const Tensor& tensor) {
    std::vector<double> out(tensor.size());
    for (int64_t i = 0; i < tensor.size(); ++i) {
        if (tensor.dtype == "F32") {
            float value;
            std::memcpy(&value, tensor.bytes.data() + 4 * i, 4);
            out[i] = value;
        } else {
            uint16_t bits;
            std::memcpy(&bits, tensor.bytes.data() + 2 * i, 2);
            const uint32_t widened = static_cast<uint32_t>(bits) << 16;
            float value;
            std::memcpy(&value, &widened, 4);
            out[i] = tensor.dtype == "BF16" ? static_cast<double>(value) : half_to_double(bits);
        }
    }
    return out;
}

Tensor stored(const std::vector<double>& values, const std::string& dtype, const std::vector<int64_t>& shape) {
    Tensor tensor{dtype, shape, {}};
    tensor.bytes.resize(values.size() * (dtype == "F32" ? 4 : 2));
    for (size_t i = 0; i < values.size(); ++i) {
        if (dtype == "F32") {
            const float value = static_cast<float>(values[i]);
            std::memcpy(tensor.bytes.data() + 4 * i, &value, 4);
        } else {
            const uint16_t bits = dtype == "BF16" ? round_to_16(values[i], 7, 8) : round_to_16(values[i], 10, 5);
            std::memcpy(tensor.bytes.data() + 2 * i, &bits, 2);
        }
    }
    return tensor;
}

// -- the problem -----------------------------------------------------------------------------------------------------

struct Refusal {
    std::string clause, message;
};

void refuse(const std::string& clause, const std::string& name, int64_t value, const std::string& limit) {
    throw Refusal{clause, name + " is " + std::to_string(value) + ": " + limit};
}

struct Problem {
    const Json& options;
    const Tensors& tensors;
    int64_t num_qo_heads, num_kv_heads, group, dim_qk, dim_vo, page_size, num_pages, batch, table_width;

    Problem(const Json& message, const Tensors& given) : options(message), tensors(given) {
        num_qo_heads = options["num_qo_heads"].integer();
        num_kv_heads = options["num_kv_heads"].integer();
        dim_qk = options["head_dim_qk"].integer();
        dim_vo = options["head_dim_vo"].integer();
        page_size = options["page_size"].integer();
        num_pages = options["num_pages"].integer();
        batch = tensors.at("seqlen_kv").size();
        table_width = tensors.at("page_table").shape.at(1);
        if (num_qo_heads % num_kv_heads) refuse("GQA-MAP", "num_qo_heads", num_qo_heads, "no multiple of num_kv_heads");
        group = num_qo_heads / num_kv_heads;
        if (options["sm_scale"].is_null()) throw Refusal{"SAFE-FINITE", "sm_scale is not finite"};
        check_tensors();
        check_rule(options["mask_rule"]);
        check_pages();
        if (has_lists()) check_lists();
    }

    int64_t at(const std::string& name, int64_t i) const { return tensors.at(name).integer(i); }
    bool has_lists() const { return options.has("candidates"); }
    const Json& lists() const { return options["candidates"]; }
    int64_t rows_of(int64_t n) const { return at("qo_indptr", n + 1) - at("qo_indptr", n); }
    int64_t blocks_of(int64_t n) const {
        const int64_t size = lists()["q_block_size"].integer();
        return (rows_of(n) + size - 1) / size;
    }
    int64_t lists_per_block() const {
        const std::string& sharing = lists()["sharing"].text;
        return sharing == "query_head" ? num_qo_heads : sharing == "kv_head" ? num_kv_heads : 1;
    }
    int64_t list_of(int64_t n, int64_t local, int64_t head) const {
        int64_t block = local / lists()["q_block_size"].integer();
        for (int64_t before = 0; before < n; ++before) block += blocks_of(before);
        const std::string& sharing = lists()["sharing"].text;
        return block * lists_per_block() + (sharing == "query_head" ? head : sharing == "kv_head" ? head / group : 0);
    }

    void check_tensors() const {
        const bool is_nhd = options["layout"].text == "NHD";
        for (const auto& [name, dim] : {std::pair{"q", dim_qk}, {"k_cache", dim_qk}, {"v_cache", dim_vo}}) {
            const Tensor& tensor = tensors.at(name);
            if (tensor.shape.back() != dim)
                refuse("SAFE-SHAPE", std::string(name) + " head_dim", tensor.shape.back(), "another was announced");
            if (name[0] == 'q') continue;
            const int64_t heads = tensor.shape.at(is_nhd ? 2 : 1);
            if (heads != num_kv_heads) refuse("SAFE-SHAPE", std::string(name) + " heads", heads, "not num_kv_heads");
        }
    }

    void check_rule(const Json& rule) const {
        if (rule.is_null()) return;
        const std::string& type = rule["type"].text;
        if (type == "And" || type == "Or") {
            for (const Json& inner : rule["rules"].items) check_rule(inner);
        } else if (type == "Window") {
            for (const char* side : {"left", "right"}) {
                if (rule.has(side) && rule[side].number < 0)
                    refuse("MASK-WINDOW", side, rule[side].integer(), "must not be negative");
            }
        } else if (type != "Causal") {
            throw std::runtime_error("the mask rule " + type + " is not declared");
        }
    }

    void check_pages() const {
        for (int64_t n = 0; n < batch; ++n) {
            const int64_t needed = (at("seqlen_kv", n) + page_size - 1) / page_size;
            if (needed > table_width)
                refuse("COORD-PAGE-RANGE", "seqlen_kv", at("seqlen_kv", n), "page_table has no room for it");
            for (int64_t p = 0; p < needed; ++p) {
                const int64_t page = at("page_table", n * table_width + p);
                if (page < 0 || page >= num_pages) refuse("COORD-PAGE-RANGE", "page_table", page, "outside the pool");
                if (tensors.count("page_owned") && !tensors.at("page_owned").bytes[n * num_pages + page]) {
                    refuse("SAFE-OWNER", "page_table", page, "another request's page");
                }
            }
        }
    }

    void check_lists() const {
        if (lists()["form"].text != "set")
            throw Refusal{"SET-FORM", "form is " + lists()["form"].text + ", but candidates are a set"};
        const int64_t num_lists = tensors.at("candidate_indptr").size() - 1,
                      block_size = lists()["block_size"].integer();
        int64_t list = 0;
        for (int64_t n = 0; n < batch; ++n) {
            const int64_t ids = (at("seqlen_kv", n) + block_size - 1) / block_size;
            for (int64_t end = list + blocks_of(n) * lists_per_block(); list < end; ++list) {
                if (list >= num_lists) refuse("SAFE-SHAPE", "number of lists", num_lists, "too few");
                for (int64_t i = at("candidate_indptr", list); i < at("candidate_indptr", list + 1); ++i) {
                    const int64_t id = at("candidate_indices", i);
                    if (id != -1 && (id < 0 || id >= ids)) refuse("SET-RANGE", "candidate", id, "outside the request");
                }
            }
        }
        if (list != num_lists) refuse("SAFE-SHAPE", "number of lists", num_lists, "too many");
    }

    bool allows(const Json& rule, int64_t q_idx, int64_t kv_idx) const {
        if (rule.is_null()) return true;
        const std::string& type = rule["type"].text;
        if (type == "Causal") return kv_idx <= q_idx;
        if (type == "Window") {
            if (rule.has("left") && q_idx - kv_idx > rule["left"].integer()) return false;
            return !rule.has("right") || kv_idx - q_idx <= rule["right"].integer();
        }
        for (const Json& inner : rule["rules"].items) {
            if (allows(inner, q_idx, kv_idx) != (type == "And")) return type == "Or";
        }
        return type == "And";
    }

    // Which positions a row attends: its candidates, each once, as far as the mask allows them.
    std::vector<bool> attended(int64_t n, int64_t local, int64_t head) const {
        const int64_t length = at("seqlen_kv", n), q_idx = at("q_offset", n) + local;
        std::vector<bool> keep(length, !has_lists());
        if (has_lists()) {
            const int64_t list = list_of(n, local, head), block_size = lists()["block_size"].integer();
            for (int64_t i = at("candidate_indptr", list); i < at("candidate_indptr", list + 1); ++i) {
                const int64_t id = at("candidate_indices", i);
                for (int64_t t = id * block_size; id >= 0 && t < std::min((id + 1) * block_size, length); ++t)
                    keep[t] = true;
            }
            const int64_t window = lists()["window"].integer();
            for (int64_t t = std::max<int64_t>(0, q_idx - window + 1); t < std::min(q_idx + 1, length); ++t)
                keep[t] = true;
            for (int64_t t = 0; t < std::min(lists()["num_sink_tokens"].integer(), length); ++t) keep[t] = true;
        }
        for (int64_t t = 0; t < length; ++t) keep[t] = keep[t] && allows(options["mask_rule"], q_idx, t);
        return keep;
    }

    // Where a position's row of one KV head begins in a cache.
    int64_t place(int64_t n, int64_t position, int64_t kv_head, int64_t dim) const {
        const int64_t page = at("page_table", n * table_width + position / page_size), offset = position % page_size;
        const bool is_nhd = options["layout"].text == "NHD";
        const int64_t row = is_nhd ? (page * page_size + offset) * num_kv_heads + kv_head
                                   : (page * num_kv_heads + kv_head) * page_size + offset;
        return row * dim;
    }
};

// What a row gives to each of its keys: position and P, which sum to 1; an empty row has none, and an lse of -inf.
struct Weights {
    std::vector<std::pair<int64_t, double>> keys;
    double lse = -std::numeric_limits<double>::infinity();
};

double dot(const double* a, const double* b, int64_t size) {
    double sum = 0;
    for (int64_t d = 0; d < size; ++d) sum += a[d] * b[d];
    return sum;
}

// One query row of one head, and where its numbers are in q, out and lse.
struct Row {
    int64_t request, local, head, at;
};

Weights weigh(const Problem& p, const Row& row, const double* q, const std::vector<double>& k) {
    const double scale = p.options["sm_scale"].number;
    const std::vector<bool> keep = p.attended(row.request, row.local, row.head);
    Weights weights;
    for (int64_t t = 0; t < static_cast<int64_t>(keep.size()); ++t) {
        if (!keep[t]) continue;
        const double score = scale * dot(q, k.data() + p.place(row.request, t, row.head / p.group, p.dim_qk), p.dim_qk);
        weights.keys.emplace_back(t, score);
        weights.lse = std::max(weights.lse, score);
    }
    if (weights.keys.empty()) {
        if (p.options["empty_row"].text != "refuse") return weights;
        throw Refusal{"EMPTY-POLICY", "row " + std::to_string(row.local) + " of request " +
                                          std::to_string(row.request) + " is empty"};
    }
    double sum = 0;
    for (auto& [t, weight] : weights.keys) sum += weight = std::exp(weight - weights.lse);
    for (auto& [t, weight] : weights.keys) weight /= sum;
    weights.lse += std::log(sum);
    return weights;
}

template <typename Function>
void for_each_row(const Problem& p, Function function) {
    for (int64_t n = 0; n < p.batch; ++n) {
        for (int64_t local = 0; local < p.rows_of(n); ++local) {
            for (int64_t head = 0; head < p.num_qo_heads; ++head) {
                function(Row{n, local, head, (p.at("qo_indptr", n) + local) * p.num_qo_heads + head});
            }
        }
    }
}

void run(const Json& request) {
    const Tensors inputs = read_tensors(request["inputs"].text);
    const Problem p(request["problem"], inputs);
    const std::vector<double> q = numbers(inputs.at("q")), k = numbers(inputs.at("k_cache")),
                              v = numbers(inputs.at("v_cache"));
    const int64_t rows = p.at("qo_indptr", p.batch);
    std::vector<double> out(rows * p.num_qo_heads * p.dim_vo), lse(rows * p.num_qo_heads);
    for_each_row(p, [&](const Row& row) {
        const Weights weights = weigh(p, row, q.data() + row.at * p.dim_qk, k);
        lse[row.at] = weights.lse;
        for (const auto& [t, weight] : weights.keys) {
            const double* value = v.data() + p.place(row.request, t, row.head / p.group, p.dim_vo);
            for (int64_t d = 0; d < p.dim_vo; ++d) out[row.at * p.dim_vo + d] += weight * value[d];
        }
    });
    write_tensors(request["outputs"].text,
                  {{"out", stored(out, inputs.at("q").dtype, {rows, p.num_qo_heads, p.dim_vo})},
                   {"lse", stored(lse, "F32", {rows, p.num_qo_heads})}});
}

// With P as in the forward: dV = P dO, dS = P (dO V - sum P dO V + dlse), dQ = scale dS K, dK = scale dS Q.
void backward(const Json& request) {
    const Tensors inputs = read_tensors(request["inputs"].text);
    const Problem p(request["problem"], inputs);
    const std::vector<double> q = numbers(inputs.at("q")), k = numbers(inputs.at("k_cache")),
                              v = numbers(inputs.at("v_cache")), dout = numbers(inputs.at("dout")),
                              dlse = numbers(inputs.at("dlse"));
    const double scale = p.options["sm_scale"].number;
    std::vector<double> dq(q.size()), dk(k.size()), dv(v.size());
    for_each_row(p, [&](const Row& row) {
        const double *query = q.data() + row.at * p.dim_qk, *gradient = dout.data() + row.at * p.dim_vo;
        const Weights weights = weigh(p, row, query, k);
        double mean = 0;
        for (const auto& [t, weight] : weights.keys) {
            const int64_t at = p.place(row.request, t, row.head / p.group, p.dim_vo);
            mean += weight * dot(gradient, v.data() + at, p.dim_vo);
        }
        for (const auto& [t, weight] : weights.keys) {
            const int64_t key = p.place(row.request, t, row.head / p.group, p.dim_qk),
                          value = p.place(row.request, t, row.head / p.group, p.dim_vo);
            const double moved = dot(gradient, v.data() + value, p.dim_vo) - mean + dlse[row.at];
            for (int64_t d = 0; d < p.dim_vo; ++d) dv[value + d] += weight * gradient[d];
            for (int64_t d = 0; d < p.dim_qk; ++d) {
                dq[row.at * p.dim_qk + d] += scale * weight * moved * k[key + d];
                dk[key + d] += scale * weight * moved * query[d];
            }
        }
    });
    Tensors outputs;
    for (const auto& [name, values] : {std::pair{"q", &dq}, {"k_cache", &dk}, {"v_cache", &dv}}) {
        const Tensor& like = inputs.at(name);
        outputs[std::string("d") + name[0]] = stored(*values, like.dtype, like.shape);
    }
    write_tensors(request["outputs"].text, outputs);
}

// -- the conversation ------------------------------------------------------------------------------------------------

const char* const CAPABILITIES = R"({"type":"capabilities","capabilities":{
 "supported":{
  "mask":{"type":"OneOf","values":["none","causal","window","causal_window"]},
  "score":{"type":"OneOf","values":["none"]},
  "sink":{"type":"OneOf","values":["none"]},
  "refusal":{"type":"OneOf","values":["negative-not-hole","negative-wraps","position-at-length",
   "position-of-longer-request","position-far-out","block-past-the-end","page-at-pool-size","page-missing",
   "page-table-too-short","foreign-page","repeated-key-asked-for","head-map-uneven","too-few-lists","scale-nan",
   "window-negative","query-of-another-head-dim","cache-of-another-head-count","empty-row-refused"]}},
 "has_backward":true,"gradient_of_lse":true,"tolerates_nonfinite":true,"checks_owner":true}})";

std::string one_line(const char* text) {
    std::string out = text;
    for (char& c : out) {
        if (c == '\n') c = ' ';
    }
    return out;
}

std::string answer(const Json& request) {
    const std::string& type = request["type"].text;
    if (type == "start")
        return R"({"type":"started","protocol":1,"name":"plain loops in C++","versions":{"c++":"17"}})";
    if (type == "capabilities") return one_line(CAPABILITIES);
    if (type == "stop") return R"({"type":"stopped"})";
    if (type != "run" && type != "backward") throw std::runtime_error("knows no request " + type);
    const std::string id = std::to_string(request["id"].integer());
    try {
        type == "run" ? run(request) : backward(request);
    } catch (const Refusal& refusal) {
        return "{\"type\":\"refused\",\"id\":" + id + ",\"clause\":" + quoted(refusal.clause) +
               ",\"message\":" + quoted(refusal.message) + "}";
    } catch (const std::bad_alloc&) {
        return "{\"type\":\"failed\",\"id\":" + id + ",\"message\":\"no memory\",\"out_of_memory\":true}";
    }
    return "{\"type\":\"ran\",\"id\":" + id + ",\"path\":\"native\"}";
}

}  // namespace

int main() {
    std::string line;
    while (std::getline(std::cin, line)) {
        std::string reply;
        try {
            reply = answer(Parser(line).parse());
        } catch (const std::exception& error) {
            reply = "{\"type\":\"failed\",\"message\":" + quoted(error.what()) + "}";
        }
        std::cout << reply << std::endl;
        if (reply.find("\"stopped\"") != std::string::npos && line.find("\"stop\"") != std::string::npos) return 0;
    }
    return 0;
}
