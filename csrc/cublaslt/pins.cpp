#include "pins.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "library.h"

namespace nvfp4::cublaslt {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string integer(int64_t value) { return std::to_string(value); }

Match device_match(const Pin& pin, const DeviceInfo& device, size_t version) {
  if (device.cc_major != pin.cc_major || device.cc_minor != pin.cc_minor) {
    return {false, "pin is for compute capability " + capability_text(pin.cc_major, pin.cc_minor) +
                       ", found " + capability_text(device.cc_major, device.cc_minor)};
  }
  if (pin.sm_count != 0 && device.sm_count != pin.sm_count) {
    return {false, "pin is for " + integer(pin.sm_count) + " multiprocessors, found " +
                       integer(device.sm_count)};
  }
  if (version < pin.version_min || version > pin.version_max) {
    return {false, "pin is for cuBLASLt " + version_text(pin.version_min) + " to " +
                       version_text(pin.version_max) + ", found " + version_text(version)};
  }
  return {};
}

// The readers and writers of one line, in the order `to_text` prints them.
struct Field {
  const char* key;
  std::function<std::string(const Pin&)> write;
  std::function<void(Pin&, const std::string&)> read;
};

int64_t to_integer(const std::string& text) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    throw std::invalid_argument("expected an integer, got '" + text + "'");
  }
  return value;
}

// Of a number that `Target` can't hold nothing is kept: 2^32 + 70 is not algorithm 70.
template <typename Target>
Target to_number(const std::string& text) {
  const int64_t value = to_integer(text);
  const auto kept = static_cast<Target>(value);
  if (static_cast<int64_t>(kept) != value || (std::is_unsigned_v<Target> && value < 0)) {
    throw std::invalid_argument("out of range, got " + text);
  }
  return kept;
}

template <typename Member>
Field number(const char* key, Member Pin::* member) {
  return {key, [member](const Pin& pin) { return integer(static_cast<int64_t>(pin.*member)); },
          [member](Pin& pin, const std::string& text) { pin.*member = to_number<Member>(text); }};
}

Field attribute(const char* key, int Algorithm::* member) {
  return {key, [member](const Pin& pin) { return integer(pin.algorithm.*member); },
          [member](Pin& pin, const std::string& text) {
            pin.algorithm.*member = to_number<int>(text);
          }};
}

Field attribute(const char* key, std::optional<int> Algorithm::* member) {
  return {key,
          [member](const Pin& pin) {
            const auto& value = pin.algorithm.*member;
            return value ? integer(*value) : std::string("default");
          },
          [member](Pin& pin, const std::string& text) {
            pin.algorithm.*member = std::nullopt;
            if (text != "default") pin.algorithm.*member = to_number<int>(text);
          }};
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      {"type", [](const Pin& pin) { return std::string(name(pin.type)); },
       [](Pin& pin, const std::string& text) { pin.type = parse_element_type(text); }},
      number("cc_major", &Pin::cc_major),
      number("cc_minor", &Pin::cc_minor),
      number("sm_count", &Pin::sm_count),
      number("version_min", &Pin::version_min),
      number("version_max", &Pin::version_max),
      number("m_min", &Pin::m_min),
      number("m_max", &Pin::m_max),
      number("n", &Pin::n),
      number("k", &Pin::k),
      attribute("id", &Algorithm::id),
      attribute("tile", &Algorithm::tile),
      attribute("stages", &Algorithm::stages),
      attribute("split_k", &Algorithm::split_k),
      attribute("reduction", &Algorithm::reduction),
      attribute("swizzle", &Algorithm::swizzle),
      attribute("custom", &Algorithm::custom),
      attribute("inner", &Algorithm::inner),
      attribute("cluster", &Algorithm::cluster),
      number("fills_chip", &Pin::fills_chip),
  };
  return all;
}

}  // namespace

bool Pin::operator==(const Pin& other) const { return to_text(*this) == to_text(other); }

PinPolicy parse_policy(const std::string& text) {
  if (text == "validated") return PinPolicy::kValidated;
  if (text == "always") return PinPolicy::kAlways;
  if (text == "never") return PinPolicy::kNever;
  throw std::invalid_argument("NVFP4_PIN_POLICY must be validated, always or never, got '" + text +
                              "'");
}

const char* name(PinPolicy policy) {
  switch (policy) {
    case PinPolicy::kValidated:
      return "validated";
    case PinPolicy::kAlways:
      return "always";
    case PinPolicy::kNever:
      return "never";
  }
  return "?";
}

const Pin& studied_pin() {
  static const Pin pin = [] {
    Pin p;
    p.cc_major = 12;
    p.cc_minor = 1;
    p.type = ElementType::kNvfp4;
    p.algorithm.id = 70;
    p.algorithm.tile = 20;    // 128x128
    p.algorithm.stages = 37;  // 256xAUTO
    p.algorithm.split_k = 1;
    p.algorithm.reduction = 0;
    p.algorithm.swizzle = 0;
    p.algorithm.custom = 0;
    // The study recorded neither inner nor cluster shape: AlgoInit's own stand.
    p.fills_chip = true;
    p.evidence =
        "GB10 study: 15.636 ms against the heuristic's 53.618 ms at m=37824, n=5376, k=14336, "
        "byte-exact through sweep, block and 12-step trajectory gates";
    return p;
  }();
  return pin;
}

Match match(const Pin& pin, const Problem& problem, size_t version, PinPolicy policy) {
  if (pin.type != problem.type || problem.m < pin.m_min ||
      (pin.m_max != 0 && problem.m > pin.m_max) || (pin.n != 0 && problem.n != pin.n) ||
      (pin.k != 0 && problem.k != pin.k)) {
    return {true, "pin is for another problem"};
  }
  const bool anywhere =
      policy == PinPolicy::kAlways && problem.device.cc_major >= 10 && pin == studied_pin();
  if (!anywhere) {
    const Match device = device_match(pin, problem.device, version);
    if (!device.reason.empty()) return device;
  }
  const bool evident = pin.evidence.find_first_not_of(" \t") != std::string::npos;
  if (policy == PinPolicy::kValidated && pin.from_file && !evident) {
    return {false,
            "pin has no evidence, which policy validated asks of a pin file's row: sweep and gate "
            "find it, policy always takes the row without"};
  }
  int rows, columns;
  if (pin.fills_chip && tile_shape(pin.algorithm.tile, &rows, &columns)) {
    const int64_t tiles = ceil_div(problem.n, rows) * ceil_div(problem.m, columns);
    if (tiles < problem.device.sm_count) {
      return {false, "pin's " + tile_name(pin.algorithm.tile) +
                         " tiles don't fill the chip: " + integer(tiles) + " for " +
                         integer(problem.device.sm_count) + " multiprocessors"};
    }
  }
  return {};
}

std::string to_text(const Pin& pin) {
  std::string text;
  for (const Field& field : fields()) text += std::string(field.key) + "=" + field.write(pin) + " ";
  return text + "evidence=" + pin.evidence;
}

Pin parse_pin(const std::string& text) {
  Pin pin;
  for (size_t begin = text.find_first_not_of(' '); begin != std::string::npos;) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const size_t equals = std::min(text.find('=', begin), end);
    const std::string key = text.substr(begin, equals - begin);
    const std::string value = equals == end ? "" : text.substr(equals + 1, end - equals - 1);
    if (key == "evidence") {
      if (equals != end) pin.evidence = text.substr(equals + 1);
      break;
    }
    const auto& all = fields();
    const auto field =
        std::find_if(all.begin(), all.end(), [&](const Field& field) { return key == field.key; });
    if (field == all.end()) throw std::invalid_argument("pin: unknown key '" + key + "'");
    try {
      field->read(pin, value);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("pin: " + key + ": " + error.what());
    }
    begin = text.find_first_not_of(' ', end);
  }
  return pin;
}

}  // namespace nvfp4::cublaslt
