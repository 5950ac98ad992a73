// What the C++ libraries compute, against plain loops: for machines on which Python's tests do not run.
// `scripts/test_arm.py` compiles it with the libraries' sources and runs it under an emulator.
#include <sys/uio.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using Bf16 = uint16_t;

extern "C" {
int few_rows_f32(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int);
int few_rows_bf16(const Bf16*, const Bf16*, const Bf16*, Bf16*, int64_t, int64_t, int64_t, int);
int any_rows_f32();
int any_rows_bf16();
int panel_width_f32();
int decode_attention_f32(const float*, int64_t, const float*, float*, const int64_t*,
                         const int64_t*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t,
                         float, float, int64_t, int64_t, int64_t, int64_t, int);
void prefill_attention_f32(const float*, int64_t, const float*, float*, const int64_t*,
                           const int64_t*, const int64_t*, const float*, int64_t, int64_t, int64_t,
                           int64_t, int64_t, float, float, int64_t, int64_t, int64_t, int64_t, int,
                           float*, int);
int kvmesh_has_crc32c();
uint32_t kvmesh_crc32c(const void*, uint64_t, uint32_t);
void kvmesh_copy(const iovec*, int64_t, const iovec*, int64_t, int64_t);
}

namespace {

std::mt19937 random_bits(7);
int failures = 0;

void expect(bool holds, const std::string& what) {
  std::printf("%s %s\n", holds ? "ok  " : "FAIL", what.c_str());
  failures += !holds;
}

std::vector<float> numbers(size_t count) {
  std::normal_distribution<float> draw;
  std::vector<float> made(count);
  for (float& each : made) each = draw(random_bits);
  return made;
}

float widened(float value) { return value; }
float widened(Bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float made;
  std::memcpy(&made, &bits, sizeof made);
  return made;
}

template <typename T>
std::vector<T> as(const std::vector<float>& values) {
  std::vector<T> made(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if constexpr (sizeof(T) == 4) {
      made[i] = values[i];
    } else {
      uint32_t bits;
      std::memcpy(&bits, &values[i], sizeof bits);
      made[i] = static_cast<Bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
  return made;
}

// Panels of some outputs, a lane of inputs after the other, as `host.in_panels` makes them.
template <typename T>
std::vector<T> in_panels(const std::vector<T>& weight, int64_t outputs, int64_t inputs) {
  const int64_t lane = 4 / sizeof(T), width = panel_width_f32();
  std::vector<T> made(weight.size());
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t i = 0; i < inputs; ++i)
      made[o / width * width * inputs + i / lane * width * lane + o % width * lane + i % lane] =
          weight[o * inputs + i];
  return made;
}

template <typename T, typename Call>
void check_products(const char* name, Call call, bool any_rows, float tolerance) {
  constexpr int64_t outputs = 192, inputs = 336;
  const auto weight = as<T>(numbers(outputs * inputs)), bias = as<T>(numbers(outputs));
  const auto panels = in_panels(weight, outputs, inputs);
  const auto x = as<T>(numbers(250 * inputs));
  std::vector<T> alone;
  for (int64_t rows : {1, 2, 5, 6, 7, 33, 64, 65, 250}) {
    if (rows > 64 && !any_rows) continue;
    std::vector<T> out(rows * outputs);
    call(x.data(), panels.data(), bias.data(), out.data(), rows, outputs, inputs, 2);
    float worst = 0;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t o = 0; o < outputs; ++o) {
        double sum = widened(bias[o]);
        for (int64_t i = 0; i < inputs; ++i)
          sum += double{widened(x[row * inputs + i])} * widened(weight[o * inputs + i]);
        const float found = widened(out[row * outputs + o]);
        worst = std::max(worst, std::abs(found - static_cast<float>(sum)) /
                                    (1 + std::abs(static_cast<float>(sum))));
      }
    if (rows == 1) alone = out;
    const bool same = std::equal(alone.begin(), alone.end(), out.begin());
    expect(worst < tolerance && same, std::string(name) + " of " + std::to_string(rows) + " rows");
  }
}

// One layer of a pool [block][key, value][16 positions][kv_heads][dim]; two sequences.
void check_attention() {
  constexpr int64_t dim = 64, heads = 6, kv_heads = 2, size = 16, blocks = 12, length = 83;
  constexpr int64_t plane = size * kv_heads * dim;
  const auto kv = numbers(2 * blocks * 2 * plane);
  std::vector<int64_t> tables(2 * blocks), lens = {length, 150}, starts = {0, length, length + 150};
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = (7 * i + 3) % tables.size();
  const auto q = numbers(starts[2] * heads * dim);
  const auto at = [&](int64_t sequence, int64_t position, int64_t head) {
    const int64_t block = tables[sequence * blocks + position / size];
    return &kv[block * 2 * plane + (position % size * kv_heads + head / 3) * dim];
  };
  const auto expected = [&](int64_t sequence, const float* query, int64_t head, int64_t seen) {
    std::vector<double> scores(seen), out(dim);
    double total = 0;
    for (int64_t p = 0; p < seen; ++p) {
      for (int64_t i = 0; i < dim; ++i) scores[p] += double{query[i]} * at(sequence, p, head)[i];
      total += scores[p] = std::exp(scores[p] * 0.125);
    }
    for (int64_t p = 0; p < seen; ++p)
      for (int64_t i = 0; i < dim; ++i)
        out[i] += scores[p] / total * at(sequence, p, head)[plane + i];
    return out;
  };
  const auto worst_of = [&](const std::vector<float>& found, bool is_prompt) {
    double worst = 0;
    for (int64_t sequence = 0; sequence < 2; ++sequence) {
      const int64_t rows = is_prompt ? lens[sequence] : 1;
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t place = ((is_prompt ? starts[sequence] + row : sequence) * heads + head) * dim;
          const auto out = expected(sequence, &q[place], head, is_prompt ? row + 1 : lens[sequence]);
          for (int64_t i = 0; i < dim; ++i) worst = std::max(worst, std::abs(out[i] - found[place + i]));
        }
    }
    return worst;
  };
  std::vector<float> decoded(2 * heads * dim), prompts(q.size());
  decode_attention_f32(q.data(), heads * dim, kv.data(), decoded.data(), tables.data(), lens.data(),
                       nullptr, blocks, 2, heads, dim, 0, 0.125f, 0, 2 * plane, plane, size,
                       kv_heads, 2);
  expect(worst_of(decoded, false) < 1e-4, "attention of decode steps");
  prefill_attention_f32(q.data(), heads * dim, kv.data(), prompts.data(), tables.data(),
                        starts.data(), lens.data(), nullptr, blocks, 2, heads, dim, 0, 0.125f, 0,
                        2 * plane, plane, size, kv_heads, 1, nullptr, 2);
  expect(worst_of(prompts, true) < 1e-4, "attention of prompts");
}

uint32_t crc_of(const uint8_t* at, size_t size, uint32_t value) {
  uint32_t crc = ~value;
  for (size_t i = 0; i < size; ++i) {
    crc ^= at[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

void check_transfers() {
  std::vector<uint8_t> from(300000), to(from.size());
  for (uint8_t& each : from) each = static_cast<uint8_t>(random_bits());
  expect(kvmesh_has_crc32c(), "crc32c by the processor");
  for (size_t size : {0, 1, 7, 64, 767, 768, 6144, 16384, 299999})
    expect(kvmesh_crc32c(&from[1], size, 5) == crc_of(&from[1], size, 5),
           "crc32c of " + std::to_string(size) + " bytes");
  const iovec targets[] = {{&to[100], 150000}, {&to[0], 100}};
  const iovec sources[] = {{&from[0], 77}, {&from[77], 150023}};
  kvmesh_copy(targets, 2, sources, 2, 1);
  expect(!std::memcmp(&to[100], &from[0], 150000) && !std::memcmp(&to[0], &from[150000], 100),
         "a copy that is cut otherwise on each side");
}

}  // namespace

int main() {
  check_products<float>("fp32 products", few_rows_f32, any_rows_f32(), 1e-4f);
  check_products<Bf16>("bf16 products", few_rows_bf16, any_rows_bf16(), 1e-2f);
  check_attention();
  check_transfers();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
