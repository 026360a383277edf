// libfake_cublasLt.so: a test double with cuBLASLt's ABI, for machines without a GPU.
//
// It computes on host memory, writes down everything it is given, and fails on request. Its
// defaults are a GB10's as the study saw it: NVFP4 algorithm 70, tile 20, stages 37 passes
// AlgoCheck with split-K 1 and no workspace, and is refused with split-K 2, 4, 8 and 16.
//
// It says no where the real library does, so that code which passes here has earned it: wrong
// attribute widths, block scales without pointers, scale pointers nobody asked for, misaligned
// pointers, too little workspace. And like the real library it dies (SIGFPE) of a tile id that its
// version doesn't know.
//
// Built with FAKE_ON_GPU, for a GPU that is there: operands are in its memory, and a kernel without
// any cunning multiplies them. No NVFP4 then, as on a Hopper.
//
// Control: fake_configure(key, value), fake_reset(), fake_records() (a JSON list of calls),
// fake_live() (descriptors not yet destroyed).

#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#if defined(FAKE_ON_GPU)
#include "gpu_product.h"
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

struct cublasLtContext {
  int number;
};

namespace {

// ---- What the test set -------------------------------------------------------------------------

const std::map<std::string, std::string>& defaults() {
  static const std::map<std::string, std::string> values = {
      {"version", "130100"},
#if defined(FAKE_ON_GPU)
      {"cc", "90"},
#else
      {"cc", "121"},
#endif
      {"create_status", "0"},
      {"init_status", "0"},
      {"set_status", "0"},       // of every AlgoConfigSetAttribute
      {"check_status", "0"},     // replaces the rules below where not 0
      {"check_state", "0"},      // negative: left as it was
      {"check_workspace", "0"},  // what AlgoCheck says an accepted algorithm needs
      {"heuristic_status", "0"},
      {"heuristic_state", "0"},
      // id:tile:stages:split_k:workspace, best first. The first is the stream-K kernel of the
      // study.
      {"heuristic_answers", "70:20:37:-2:4194304 70:20:36:1:0 66:23:37:1:0"},
      {"matmul_status", "0"},
      {"matmul_refuses_id", "-1"},  // NOT_SUPPORTED for this algorithm id alone
      {"inner", "0"},               // what AlgoInit gives
      {"cluster", "0"},
  };
  return values;
}

std::recursive_mutex mutex;
std::map<std::string, std::string> settings = defaults();
std::vector<std::string> records;
std::string records_json;
int handles = 0;
std::atomic<int> live{0};  // descriptors created and not yet destroyed

int setting(const char* key) { return std::stoi(settings.at(key)); }
cublasStatus_t status_setting(const char* key) { return static_cast<cublasStatus_t>(setting(key)); }

// ---- Records -----------------------------------------------------------------------------------

// One call, as a line of JSON. Plain strings, no iostreams: with those this library crashed in a
// process that had torch's CUDA build loaded (seen on an H200 machine).
class Record {
 public:
  explicit Record(const char* call) : text_("{\"call\": \"" + std::string(call) + "\"") {}
  Record& add(const char* key, const std::string& json) {
    text_ += ", \"" + std::string(key) + "\": " + json;
    return *this;
  }
  template <typename Number>
  Record& add(const char* key, Number value) {
    return add(key, std::to_string(value));
  }
  Record& add(const char* key, const char* json) { return add(key, std::string(json)); }
  Record& pointer(const char* key, const void* value) {
    return add(key, reinterpret_cast<uintptr_t>(value));
  }
  ~Record() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    records.push_back(text_ + "}");
  }

 private:
  std::string text_;
};

// ---- Descriptors -------------------------------------------------------------------------------

struct Counted {
  Counted() { ++live; }
  ~Counted() { --live; }
};

struct Layout : Counted {
  Layout(int type, uint64_t rows, uint64_t columns, int64_t leading_dimension)
      : type(type), rows(rows), columns(columns), leading_dimension(leading_dimension) {}
  int type;
  uint64_t rows, columns;
  int64_t leading_dimension;
};

// Attribute id → value, for descriptors and preferences alike.
struct Attributes : Counted {
  std::map<int, uint64_t> values;
  uint64_t get(int id) const {
    const auto found = values.find(id);
    return found == values.end() ? 0 : found->second;
  }
  std::string json() const {
    std::string text;
    for (const auto& [id, value] : values) {
      text += (text.empty() ? "\"" : ", \"") + std::to_string(id) + "\": " + std::to_string(value);
    }
    return "{" + text + "}";
  }
};

Layout* unwrap(cublasLtMatrixLayout_t layout) { return reinterpret_cast<Layout*>(layout); }
Attributes* unwrap(cublasLtMatmulDesc_t descriptor) {
  return reinterpret_cast<Attributes*>(descriptor);
}
Attributes* unwrap(cublasLtMatmulPreference_t preference) {
  return reinterpret_cast<Attributes*>(preference);
}

std::string json(const Layout& layout) {
  return "{\"type\": " + std::to_string(layout.type) +
         ", \"rows\": " + std::to_string(layout.rows) +
         ", \"columns\": " + std::to_string(layout.columns) +
         ", \"ld\": " + std::to_string(layout.leading_dimension) + "}";
}

// Bytes each attribute is stored in: anything else is INVALID_VALUE.
size_t descriptor_bytes(int attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_D_OUT_SCALE_POINTER:
      return 8;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return 1;
    default:
      return 4;
  }
}

size_t preference_bytes(int attribute) {
  return attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4;
}

cublasStatus_t store(Attributes* attributes, int id, const void* from, size_t bytes,
                     size_t expected) {
  if (!from || bytes != expected) return CUBLAS_STATUS_INVALID_VALUE;
  uint64_t value = 0;
  std::memcpy(&value, from, bytes);
  attributes->values[id] = value;
  return CUBLAS_STATUS_SUCCESS;
}

// ---- Algorithms --------------------------------------------------------------------------------

// Kept inside cublasLtMatmulAlgo_t, which callers copy about: index = attribute id.
struct __attribute__((may_alias)) Algo {
  int32_t values[9];
  uint32_t magic;
  uint64_t workspace;  // that a launch has to bring
};
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t));
constexpr uint32_t kMagic = 0xFA4E1234;

Algo* unwrap(cublasLtMatmulAlgo_t* algo) { return reinterpret_cast<Algo*>(algo); }
const Algo* unwrap(const cublasLtMatmulAlgo_t* algo) { return reinterpret_cast<const Algo*>(algo); }

bool is_wide(int attribute) { return attribute < CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID; }

std::string json(const Algo& algo) {
  std::string text;
  for (int value : algo.values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

cublasLtMatmulAlgo_t make_algo(int id) {
  cublasLtMatmulAlgo_t algo{};
  Algo* own = unwrap(&algo);
  own->magic = kMagic;
  own->workspace = setting("check_workspace");
  own->values[CUBLASLT_ALGO_CONFIG_ID] = id;
  own->values[CUBLASLT_ALGO_CONFIG_SPLITK_NUM] = 1;
  own->values[CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID] = setting("inner");
  own->values[CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID] = setting("cluster");
  return algo;
}

const std::set<int>& known_ids(int type) {
  static const std::set<int> fp4 = {66, 70, 71};
  static const std::set<int> others = {66, 67};
  return type == CUDA_R_4F_E2M1 ? fp4 : others;
}

// ---- What the real library refuses -------------------------------------------------------------

cublasStatus_t refuse_problem(const Attributes& descriptor, const Layout& a, const Layout& b,
                              const Layout& d) {
  const bool fp4 = a.type == CUDA_R_4F_E2M1;
  const bool scales = descriptor.get(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) &&
                      descriptor.get(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
  const auto block = static_cast<uint64_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
  const bool modes = descriptor.get(CUBLASLT_MATMUL_DESC_A_SCALE_MODE) == block &&
                     descriptor.get(CUBLASLT_MATMUL_DESC_B_SCALE_MODE) == block;
  if (descriptor.get(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER) ||
      descriptor.get(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (fp4 && (!scales || !modes)) return CUBLAS_STATUS_INVALID_VALUE;
  if (fp4 && setting("cc") < 100) return CUBLAS_STATUS_ARCH_MISMATCH;
  if (descriptor.get(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_T ||
      descriptor.get(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (a.rows != b.rows || a.columns != d.rows || b.columns != d.columns) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t refuse_algorithm(const Algo& algo, int type) {
  const int tile = algo.values[CUBLASLT_ALGO_CONFIG_TILE_ID];
  const int stages = algo.values[CUBLASLT_ALGO_CONFIG_STAGES_ID];
  const int split_k = algo.values[CUBLASLT_ALGO_CONFIG_SPLITK_NUM];
  // The real library divides by a table entry that isn't there.
  if (tile >= (setting("version") >= 131000 ? 646 : 635)) std::raise(SIGFPE);
  if (tile == 0 || stages == 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (type == CUDA_R_4F_E2M1 && algo.values[CUBLASLT_ALGO_CONFIG_ID] == 70 && split_k > 1) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

#if defined(FAKE_ON_GPU)

GpuMatrix gpu_matrix(const void* data, const Layout& layout) {
  return {data, layout.type, static_cast<int64_t>(layout.rows),
          static_cast<int64_t>(layout.columns), layout.leading_dimension};
}

// Of the output's type: the planner asks for no other with BF16 and FP16 operands.
const void* bias_pointer(const Attributes& descriptor) {
  if (descriptor.get(CUBLASLT_MATMUL_DESC_EPILOGUE) != CUBLASLT_EPILOGUE_BIAS) return nullptr;
  return reinterpret_cast<const void*>(descriptor.get(CUBLASLT_MATMUL_DESC_BIAS_POINTER));
}

#else

// ---- Arithmetic, on host memory ----------------------------------------------------------------

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float decode_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  if ((code & 0x7F) == 0x7F) return NAN;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

float decode_half(uint16_t code) {
  const int exponent = code >> 10 & 31, mantissa = code & 1023;
  const float sign = code & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

float decode_e2m1(uint8_t code) {
  static constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

float load(const void* data, int type, int64_t index) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  switch (type) {
    case CUDA_R_4F_E2M1:
      return decode_e2m1(bytes[index / 2] >> (index % 2 * 4) & 15);
    case CUDA_R_8F_E4M3:
      return decode_e4m3(bytes[index]);
    case CUDA_R_16BF:
      return from_bits(uint32_t{static_cast<const uint16_t*>(data)[index]} << 16);
    case CUDA_R_16F:
      return decode_half(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

uint16_t encode_half(float value) {
  if (std::isnan(value)) return 0x7E00;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (magnitude >= 65520) return sign | 0x7C00;
  int exponent;
  std::frexp(magnitude, &exponent);
  const int shift = std::max(exponent - 11, -24);  // of the last place
  const auto places = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -shift)));
  // `places` is mantissa with its hidden bit; a carry out of it lands in the exponent by itself.
  return sign | static_cast<uint16_t>(places + (shift > -24 ? (shift + 24) * 1024 : 0));
}

void store(void* data, int type, int64_t index, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(data)[index] = value;
  } else if (type == CUDA_R_16F) {
    static_cast<uint16_t*>(data)[index] = encode_half(value);
  } else {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
    static_cast<uint16_t*>(data)[index] =
        std::isnan(value) ? uint16_t{0x7FC0} : static_cast<uint16_t>(rounded >> 16);
  }
}

// Offset of a block scale in the 128x4 layout; `row` runs along the operand's outer extent.
int64_t scale_offset(int64_t row, int64_t block, int64_t k) {
  const int64_t tile_columns = (k / 16 + 3) / 4;
  return (row / 128 * tile_columns + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         block % 4;
}

// One column of an operand (k, columns), decoded.
std::vector<float> column(const void* data, const Layout& layout, const void* scale,
                          int64_t index) {
  const int64_t k = static_cast<int64_t>(layout.rows);
  std::vector<float> values(k);
  for (int64_t i = 0; i < k; ++i) {
    values[i] = load(data, layout.type, index * layout.leading_dimension + i);
    if (layout.type == CUDA_R_4F_E2M1) {
      values[i] *= decode_e4m3(static_cast<const uint8_t*>(scale)[scale_offset(index, i / 16, k)]);
    } else if (scale) {
      values[i] *= *static_cast<const float*>(scale);
    }
  }
  return values;
}

void multiply(const Attributes& descriptor, float alpha, const void* a, const Layout& a_layout,
              const void* b, const Layout& b_layout, void* d, const Layout& d_layout) {
  const auto pointer = [&](int attribute) {
    return reinterpret_cast<const void*>(descriptor.get(attribute));
  };
  const bool bias = descriptor.get(CUBLASLT_MATMUL_DESC_EPILOGUE) == CUBLASLT_EPILOGUE_BIAS;
  const auto bias_type = static_cast<int>(descriptor.get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE));
  std::vector<std::vector<float> > a_columns;
  for (uint64_t i = 0; i < d_layout.rows; ++i) {
    a_columns.push_back(column(a, a_layout, pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER), i));
  }
  for (uint64_t j = 0; j < d_layout.columns; ++j) {
    const auto b_column = column(b, b_layout, pointer(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER), j);
    for (uint64_t i = 0; i < d_layout.rows; ++i) {
      float sum = 0;
      for (size_t k = 0; k < b_column.size(); ++k) sum += a_columns[i][k] * b_column[k];
      float value = alpha * sum;
      if (bias) value += load(pointer(CUBLASLT_MATMUL_DESC_BIAS_POINTER), bias_type, i);
      store(d, d_layout.type, j * d_layout.leading_dimension + i, value);
    }
  }
}

#endif

const char* status_name(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
      return "CUBLAS_STATUS_LICENSE_ERROR";
    default:
      return "unrecognized status";
  }
}

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

// ---- Control -----------------------------------------------------------------------------------

EXPORT int fake_configure(const char* key, const char* value) {
  Lock lock(mutex);
  const auto found = settings.find(key);
  if (found == settings.end()) return 1;
  found->second = value;
  return 0;
}

EXPORT void fake_reset() {
  Lock lock(mutex);
  settings = defaults();
  records.clear();
}

EXPORT const char* fake_records() {
  Lock lock(mutex);
  records_json = "[";
  for (const std::string& record : records) {
    records_json += (records_json.size() > 1 ? ",\n" : "") + record;
  }
  records_json += "]";
  return records_json.c_str();
}

EXPORT int fake_live() { return live; }

// ---- cuBLASLt ----------------------------------------------------------------------------------

EXPORT size_t cublasLtGetVersion() { return setting("version"); }

EXPORT const char* cublasLtGetStatusName(cublasStatus_t status) { return status_name(status); }

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  Lock lock(mutex);
  const cublasStatus_t status = status_setting("create_status");
  if (status == CUBLAS_STATUS_SUCCESS) *handle = new cublasLtContext{++handles};
  Record("cublasLtCreate").add("handle", handles);
  return status;
}

EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  Record("cublasLtDestroy").add("handle", handle->number);
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout(static_cast<int>(type), rows, columns, ld));
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete unwrap(layout);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  auto* attributes = new Attributes;
  attributes->values[CUBLASLT_MATMUL_DESC_COMPUTE_TYPE] = compute;
  attributes->values[CUBLASLT_MATMUL_DESC_SCALE_TYPE] = scale;
  *descriptor = reinterpret_cast<cublasLtMatmulDesc_t>(attributes);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) {
  delete unwrap(descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void* from, size_t bytes) {
  return store(unwrap(descriptor), attribute, from, bytes, descriptor_bytes(attribute));
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Attributes);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete unwrap(preference);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
    const void* from, size_t bytes) {
  return store(unwrap(preference), attribute, from, bytes, preference_bytes(attribute));
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t, cublasComputeType_t,
                                               cudaDataType_t, cudaDataType_t a_type,
                                               cudaDataType_t, cudaDataType_t, cudaDataType_t,
                                               int requested, int ids[], int* found) {
  *found = 0;
  for (int id : known_ids(a_type)) {
    if (*found < requested) ids[(*found)++] = id;
  }
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t, cublasComputeType_t compute,
                                             cudaDataType_t scale, cudaDataType_t a_type,
                                             cudaDataType_t b_type, cudaDataType_t c_type,
                                             cudaDataType_t d_type, int id,
                                             cublasLtMatmulAlgo_t* algo) {
  Lock lock(mutex);
  Record("cublasLtMatmulAlgoInit")
      .add("compute", compute)
      .add("scale", scale)
      .add("a_type", a_type)
      .add("b_type", b_type)
      .add("c_type", c_type)
      .add("d_type", d_type)
      .add("id", id);
  const cublasStatus_t status = status_setting("init_status");
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (!known_ids(a_type).count(id)) return CUBLAS_STATUS_INVALID_VALUE;
  *algo = make_algo(id);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(
    cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoConfigAttributes_t attribute, const void* from,
    size_t bytes) {
  Lock lock(mutex);
  int32_t value = 0;
  if (bytes == 2) {
    uint16_t narrow;
    std::memcpy(&narrow, from, 2);
    value = narrow;
  } else if (bytes == 4) {
    std::memcpy(&value, from, 4);
  }
  Record("cublasLtMatmulAlgoConfigSetAttribute")
      .add("attribute", attribute)
      .add("bytes", bytes)
      .add("value", value);
  const cublasStatus_t status = status_setting("set_status");
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const bool known = attribute > CUBLASLT_ALGO_CONFIG_ID &&  // the id is read-only
                     attribute <= CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
  if (!known || bytes != (is_wide(attribute) ? 4u : 2u)) return CUBLAS_STATUS_INVALID_VALUE;
  unwrap(algo)->values[attribute] = value;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoConfigAttributes_t attribute, void* to,
    size_t bytes, size_t* written) {
  if (unwrap(algo)->magic != kMagic) return CUBLAS_STATUS_INVALID_VALUE;
  if (bytes != (is_wide(attribute) ? 4u : 2u)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(to, &unwrap(algo)->values[attribute], bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                        cublasLtMatmulAlgoCapAttributes_t attribute,
                                                        void* to, size_t bytes, size_t* written) {
  if (unwrap(algo)->magic != kMagic) return CUBLAS_STATUS_INVALID_VALUE;
  // The newer engines list neither tiles nor stages.
  const bool list =
      attribute == CUBLASLT_ALGO_CAP_TILE_IDS || attribute == CUBLASLT_ALGO_CAP_STAGES_IDS;
  if (written) *written = list ? 0 : 4;
  if (!list && bytes >= 4) std::memset(to, 0, 4);
  return CUBLAS_STATUS_SUCCESS;
}

#ifndef FAKE_WITHOUT_ALGO_CHECK
EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t descriptor,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algo,
                                              cublasLtMatmulHeuristicResult_t* result) {
  Lock lock(mutex);
  Record("cublasLtMatmulAlgoCheck")
      .add("handle", handle->number)
      .add("algo", json(*unwrap(algo)))
      .add("descriptor", unwrap(descriptor)->json())
      .add("a", json(*unwrap(a)))
      .add("b", json(*unwrap(b)))
      .add("c", json(*unwrap(c)))
      .add("d", json(*unwrap(d)));
  cublasStatus_t status = status_setting("check_status");
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  status = refuse_problem(*unwrap(descriptor), *unwrap(a), *unwrap(b), *unwrap(d));
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  status = refuse_algorithm(*unwrap(algo), unwrap(a)->type);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  result->workspaceSize = setting("check_workspace");
  if (setting("check_state") >= 0) result->state = status_setting("check_state");
  result->wavesCount = 1.0f;
  return CUBLAS_STATUS_SUCCESS;
}
#endif

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t results[],
    int* found) {
  Lock lock(mutex);
  Record("cublasLtMatmulAlgoGetHeuristic")
      .add("handle", handle->number)
      .add("requested", requested)
      .add("descriptor", unwrap(descriptor)->json())
      .add("preference", unwrap(preference)->json())
      .add("a", json(*unwrap(a)))
      .add("b", json(*unwrap(b)))
      .add("c", json(*unwrap(c)))
      .add("d", json(*unwrap(d)));
  *found = 0;
  cublasStatus_t status = status_setting("heuristic_status");
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  status = refuse_problem(*unwrap(descriptor), *unwrap(a), *unwrap(b), *unwrap(d));
  if (status == CUBLAS_STATUS_ARCH_MISMATCH) status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const std::string& answers = settings.at("heuristic_answers");
  const uint64_t limit = unwrap(preference)->get(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
  int id, tile, stages, split_k, length;
  unsigned long long workspace;
  for (const char* rest = answers.c_str();
       *found < requested && std::sscanf(rest, "%d:%d:%d:%d:%llu %n", &id, &tile, &stages, &split_k,
                                         &workspace, &length) == 5;
       rest += length) {
    if (workspace > limit) continue;
    auto& result = results[(*found)++];
    result.algo = make_algo(id);
    unwrap(&result.algo)->workspace = workspace;
    auto& values = unwrap(&result.algo)->values;
    values[CUBLASLT_ALGO_CONFIG_TILE_ID] = tile;
    values[CUBLASLT_ALGO_CONFIG_STAGES_ID] = stages;
    values[CUBLASLT_ALGO_CONFIG_SPLITK_NUM] = split_k;
    result.workspaceSize = workspace;
    result.state = status_setting("heuristic_state");
    result.wavesCount = 0.5f;
  }
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t descriptor,
                                     const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b,
                                     cublasLtMatrixLayout_t b_layout, const void* beta,
                                     const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace,
                                     size_t workspace_bytes, cudaStream_t stream) {
  // Not held during the arithmetic: concurrent launches must be able to meet.
  cublasStatus_t status;
  {
    Lock lock(mutex);
    Record("cublasLtMatmul")
        .add("handle", handle->number)
        .add("algo", json(*unwrap(algo)))
        .add("descriptor", unwrap(descriptor)->json())
        .add("a_layout", json(*unwrap(a_layout)))
        .add("b_layout", json(*unwrap(b_layout)))
        .add("d_layout", json(*unwrap(d_layout)))
        .add("c_is_d", c == d && c_layout == d_layout ? "true" : "false")
        .pointer("a", a)
        .pointer("b", b)
        .pointer("d", d)
        .pointer("alpha", alpha)
        .pointer("beta", beta)
        .pointer("workspace", workspace)
        .add("workspace_bytes", workspace_bytes)
        .pointer("stream", stream);
    status = status_setting("matmul_status");
    if (unwrap(algo)->values[CUBLASLT_ALGO_CONFIG_ID] == setting("matmul_refuses_id")) {
      status = CUBLAS_STATUS_NOT_SUPPORTED;
    }
  }
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Attributes& attributes = *unwrap(descriptor);
  status = refuse_problem(attributes, *unwrap(a_layout), *unwrap(b_layout), *unwrap(d_layout));
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (unwrap(a_layout)->type == CUDA_R_4F_E2M1 &&
      !(aligned(a, 16) && aligned(b, 16) && aligned(d, 16))) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (workspace_bytes < unwrap(algo)->workspace || !aligned(workspace, 256)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
#if defined(FAKE_ON_GPU)
  const bool on_gpu =
      attributes.get(CUBLASLT_MATMUL_DESC_POINTER_MODE) == CUBLASLT_POINTER_MODE_DEVICE;
  if (!on_gpu && *static_cast<const float*>(beta) != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  const bool launched =
      gpu_product(gpu_matrix(a, *unwrap(a_layout)), gpu_matrix(b, *unwrap(b_layout)),
                  gpu_matrix(d, *unwrap(d_layout)), bias_pointer(attributes),
                  static_cast<const float*>(alpha), on_gpu, stream);
  return launched ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
#else
  if (*static_cast<const float*>(beta) != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  multiply(attributes, *static_cast<const float*>(alpha), a, *unwrap(a_layout), b,
           *unwrap(b_layout), d, *unwrap(d_layout));
  return CUBLAS_STATUS_SUCCESS;
#endif
}
