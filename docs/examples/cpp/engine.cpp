// An engine of kvspec in C++17: five published methods, in float64, with the standard library alone.
//
//     g++ -O2 -std=c++17 engine.cpp -o engine
//     kvspec verify --command ./engine --as snapkv,pyramidkv,keydiff,knorm,streamingllm
//
// It reads requests and writes answers as spec/protocol.md has them. Names like PO-SNAPKV are items of
// spec/policies.md, which say what each function must do.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using Row = std::vector<double>;
using Rows = std::vector<Row>;
using Positions = std::vector<size_t>;

// ---- values: spec/protocol.md, section "Values" ----

struct Value {
    char type;         // { [ " or, of what is none of these, the first letter
    std::string text;  // of what is no object or list
    Positions shape;   // of an array
    Row x;             // its numbers, the last axis fastest
    std::map<std::string, Value> members;

    const Value &operator[](const std::string &name) const { return members.at(name); }
    size_t whole() const { return std::stoull(text); }
    // The rows of one head of an array of four axes, where heads are counted over all layers.
    Rows rows(size_t head) const {
        const size_t n = shape.at(2), d = shape.at(3);
        Rows found;
        for (size_t row = head * n; row < (head + 1) * n; row++)
            found.emplace_back(x.begin() + row * d, x.begin() + (row + 1) * d);
        return found;
    }
};

// The floats of base64, as a little-endian machine has them.
template <typename Float> Row floats_of(const std::string &base64) {
    const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string bytes;
    unsigned held = 0, bits = 0;
    for (const char digit : base64.substr(0, base64.find('='))) {
        held = held << 6 | digits.find(digit);
        if ((bits += 6) >= 8)
            bytes += static_cast<char>(held >> (bits -= 8));
    }
    std::vector<Float> found(bytes.size() / sizeof(Float));
    std::memcpy(found.data(), bytes.data(), found.size() * sizeof(Float));
    return Row(found.begin(), found.end());
}

char next(const char *&at) {
    at += std::strspn(at, " \t\r,:");
    return *at != '\0' ? *at : throw std::runtime_error("the request ends too early");
}

// Of valid JSON, where commas and colons are like spaces. No text that an engine must read has a backslash.
Value parsed(const char *&at) {
    Value found{next(at), "", {}, {}, {}};
    if (found.type == '{') {
        for (at++; next(at) != '}';) {
            const std::string name = parsed(at).text;
            found.members[name] = parsed(at);
        }
        at++;
        if (found.members.count("base64")) {
            const std::string &base64 = found["base64"].text;
            found.shape.assign(found["shape"].x.begin(), found["shape"].x.end());
            found.x = found["dtype"].text == "float32" ? floats_of<float>(base64) : floats_of<double>(base64);
        }
    } else if (found.type == '[') {
        size_t count = 0;
        for (at++; next(at) != ']'; count++) {
            const Value item = parsed(at);
            found.x.insert(found.x.end(), item.x.begin(), item.x.end());
            found.shape = item.shape;
        }
        at++;
        found.shape.insert(found.shape.begin(), count);
    } else {
        at += found.type == '"';
        const size_t length = std::strcspn(at, found.type == '"' ? "\"" : " ,]}\r");
        found.text.assign(at, length);
        found.x = {std::strtod(found.text.c_str(), nullptr)};  // reads 0x1.8p+0
        at += length + (found.type == '"');
    }
    return found;
}

// ---- parts of policies ----

double dot(const Row &x, const Row &y) { return std::inner_product(x.begin(), x.end(), y.begin(), 0.0); }

double norm(const Row &x) { return std::sqrt(dot(x, x)); }

void add(Row &sums, const Row &row) {
    for (size_t j = 0; j < sums.size(); j++)
        sums[j] += row[j];
}

// The first `number` places by scores that fall; of equal scores the lower place.
Positions highest(const Row &scores, size_t number) {
    Positions order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t i, size_t j) { return scores[i] > scores[j]; });
    order.resize(std::min(number, order.size()));
    return order;
}

// PO-TOP-UNITS: the tokens behind the scored ones are protected.
Positions top_units(const Row &scores, size_t n, size_t share) {
    Positions kept = highest(scores, share - std::min(share, n - scores.size()));
    std::sort(kept.begin(), kept.end());
    for (size_t j = scores.size(); j < n; j++)
        kept.push_back(j);
    return kept;
}

// PO-POOL, the maximum.
Row pool(const Row &row, size_t kernel) {
    Row found;
    for (size_t j = 0; j < row.size(); j++)
        found.push_back(*std::max_element(row.begin() + (j - std::min(j, kernel / 2)),
                                          row.begin() + std::min(row.size(), j + kernel / 2 + 1)));
    return found;
}

// PO-OBSERVED-ATTENTION of one query on the keys that it sees.
Row attention(const Value &given, const Row &query, const Rows &keys, size_t seen, double sink) {
    const double scaling = given["scaling"].x[0], softcap = given["softcap"].x[0];  // null is read as 0
    Row A;
    for (size_t j = 0; j < seen; j++) {
        const double logit = scaling * dot(query, keys[j]);
        A.push_back(softcap == 0 ? logit : softcap * std::tanh(logit / softcap));
    }
    const double most = std::max(sink, *std::max_element(A.begin(), A.end()));
    double total = std::exp(sink - most);
    for (double &weight : A)
        total += weight = std::exp(weight - most);
    for (double &weight : A)
        weight /= total;
    return A;
}

// PO-WHOLE-SHARES of targets that are fractions of one denominator; `missing` is first their sum.
Positions whole_shares(const Positions &targets, size_t denominator, size_t missing) {
    Positions shares;
    Row remainders;
    for (const size_t target : targets) {
        missing -= target / denominator;
        shares.push_back(target / denominator);
        remainders.push_back(target % denominator);
    }
    for (const size_t place : highest(remainders, missing))
        shares[place]++;
    return shares;
}

// PO-PYRAMID-BUDGET. In fractions of beta (L - 1) the line is whole.
Positions pyramid(const Value &given) {
    const size_t L = given["k"].shape.at(0), n = given["n"].whole(), B = given["B"].whole();
    const size_t W = std::min(n, given["W"].whole()), base = B - W;
    if (L == 1 || B >= n)
        return Positions(L, B);
    const size_t one = given["beta"].whole() * (L - 1);
    const size_t most = std::min(2 * base * one - base * (L - 1), (n - W) * one);
    Positions targets;
    for (size_t l = 0; l < L; l++)
        targets.push_back(W * one + most - l * (2 * (most - base * one) / (L - 1)));
    return whole_shares(targets, one, L * B);
}

// ---- methods: scores in the kept set g, of the tokens before the protected ones ----

// PO-SNAPKV
Row snapkv(const Value &given, size_t g) {
    const Rows keys = given["k"].rows(g);
    const size_t n = keys.size(), past = n - std::min(n, given["W"].whole());
    const size_t group = given["q"].shape.at(1) / given["k"].shape.at(1);
    Row score(past);
    for (size_t h = g * group; h < (g + 1) * group; h++) {
        const Rows queries = given["q"].rows(h);
        const double sink = given["sinks"].type == 'n' ? -INFINITY : given["sinks"].x.at(h);
        Row sums(past);
        for (size_t i = past; i < n; i++)
            add(sums, attention(given, queries.at(queries.size() - n + i), keys, i + 1, sink));
        add(score, pool(sums, given["kernel"].whole()));
    }
    for (double &one : score)
        one /= group;
    return score;
}

// PO-KEYDIFF: the sum of unit keys has the direction of their mean.
Row keydiff(const Value &given, size_t g) {
    const Rows keys = given["k"].rows(g);
    Row sum(keys.at(0).size()), score;
    for (const Row &key : keys)
        for (size_t c = 0; c < sum.size(); c++)
            sum[c] += key[c] / norm(key);
    const double length = norm(sum);
    for (const Row &key : keys)
        score.push_back(length > 0 ? -dot(key, sum) / norm(key) / length : 0);
    return score;
}

// PO-KNORM
Row knorm(const Value &given, size_t g) {
    Row score;
    for (const Row &key : given["k"].rows(g))
        score.push_back(-norm(key));
    return score;
}

// PO-STREAMINGLLM as scores: infinite for sinks, else higher for newer tokens.
Row streamingllm(const Value &given, size_t) {
    Row score(given["n"].whole());
    std::iota(score.begin(), score.end(), 0.0);
    std::fill_n(score.begin(), std::min(score.size(), given["N_sink"].whole()), INFINITY);
    return score;
}

const std::map<std::string, Row (*)(const Value &, size_t)> SCORES = {
    {"methods.snapkv", snapkv}, {"methods.pyramidkv", snapkv}, {"methods.keydiff", keydiff},
    {"methods.knorm", knorm}, {"methods.streamingllm", streamingllm},
};
const char *const HELLO =
    R"({"protocol": 1, "spec": "0.4.1", "name": "c++17", "version": "1.0", "precision": "float64", "families": )"
    R"({"methods": ["snapkv", "pyramidkv", "keydiff", "knorm", "streamingllm"]}})";

// ---- answers ----

void print(std::ostream &out, size_t x) { out << x; }
void print(std::ostream &out, double x) { out << '"' << std::hexfloat << x << '"'; }
template <typename Item> void print(std::ostream &out, const std::vector<Item> &items) {
    const char *comma = "";
    out << '[';
    for (const Item &item : items) {
        out << comma;
        print(out, item);
        comma = ", ";
    }
    out << ']';
}

// The KeptSets of a method.
std::string answer(const std::string &op, const Value &given) {
    const size_t g = given["g"].whole(), n = given["n"].whole();
    const Positions shares = op == "methods.pyramidkv" ? pyramid(given) : Positions(g, given["B"].whole());
    Positions positions, offsets{0};
    Rows scores;
    for (size_t set = 0; set < g; set++) {
        scores.push_back(SCORES.at(op)(given, set));
        const Positions kept = top_units(scores[set], n, shares[set * shares.size() / g]);  // one for each layer or set
        positions.insert(positions.end(), kept.begin(), kept.end());
        offsets.push_back(positions.size());
        scores[set].resize(n, NAN);
    }
    std::ostringstream out;
    print(out << "{\"positions\": ", positions);
    print(out << ", \"offsets\": ", offsets);
    print(out << ", \"scores\": ", scores);
    return out.str() + "}";
}

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        std::string id = "0";
        try {
            const char *at = line.c_str();
            const Value request = parsed(at);
            const std::string &op = request["op"].text;
            id = request["id"].text;
            const std::string result = op == "hello" ? HELLO : answer(op, request["arguments"]);
            std::cout << "{\"id\": " << id << ", \"result\": " << result << '}' << std::endl;
        } catch (const std::exception &failure) {
            std::cout << "{\"id\": " << id << ", \"error\": \"" << failure.what() << "\"}" << std::endl;
        }
    }
}
