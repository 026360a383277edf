// plan_to_json: the few lines of JSON that explain needs, without a JSON library.

#include "json.h"

#include <cmath>
#include <cstdio>
#include <type_traits>

#include "plan.h"

namespace nvfp4::cublaslt {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      out += escaped;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

namespace {

class Object {
 public:
  Object& text(const char* key, const std::string& value) { return raw(key, quoted(value)); }
  Object& number(const char* key, int64_t value) { return raw(key, std::to_string(value)); }
  Object& real(const char* key, double value) {
    if (!std::isfinite(value)) return raw(key, "null");
    std::string digits = std::to_string(value);
    for (char& c : digits) c = c == ',' ? '.' : c;  // some locales
    return raw(key, digits);
  }
  Object& flag(const char* key, bool value) { return raw(key, value ? "true" : "false"); }
  Object& optional(const char* key, const std::optional<int>& value) {
    return value ? number(key, *value) : raw(key, "null");
  }
  Object& raw(const char* key, const std::string& json) {
    body_ += (body_.empty() ? "" : ", ") + quoted(key) + ": " + json;
    return *this;
  }
  std::string json() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

std::string algorithm_json(const Algorithm& a) {
  Object object;
  object.number("id", a.id).number("tile", a.tile).number("stages", a.stages);
  object.number("split_k", a.split_k).number("reduction", a.reduction);
  object.number("swizzle", a.swizzle).number("custom", a.custom);
  object.optional("inner", a.inner).optional("cluster", a.cluster);
  object.text("tile_name", tile_name(a.tile)).text("stages_name", stages_name(a.stages));
  if (a.inner) object.text("inner_name", inner_name(*a.inner));
  if (a.cluster) object.text("cluster_name", cluster_name(*a.cluster));
  return object.json();
}

std::string problem_json(const Problem& p) {
  Object device;
  device.number("index", p.device.index).number("cc_major", p.device.cc_major);
  device.number("cc_minor", p.device.cc_minor).number("sm_count", p.device.sm_count);
  Object object;
  object.text("type", name(p.type)).number("m", p.m).number("n", p.n).number("k", p.k);
  object.number("lda", p.lda).number("ldb", p.ldb).number("ldd", p.ldd);
  object.text("out", name(p.out)).raw("bias", p.bias ? quoted(name(*p.bias)) : "null");
  object.text("alpha", name(p.alpha)).number("alignment", p.alignment);
  object.number("workspace_limit", static_cast<int64_t>(p.workspace_limit));
  return object.raw("device", device.json()).flag("skip_pins", p.skip_pins).json();
}

}  // namespace

std::string plan_to_json(const Problem& problem, const Plan& plan) {
  std::string refusals;
  for (const Refusal& refusal : plan.refusals) {
    Object object;
    object.text("rung", refusal.rung).text("reason", refusal.reason);
    refusals += (refusals.empty() ? "" : ", ") + object.json();
  }
  Object object;
  object.flag("ok", plan.ok()).raw("rung", plan.ok() ? quoted(plan.rung) : "null");
  object.raw("algorithm", plan.ok() ? algorithm_json(plan.algorithm) : "null");
  object.number("workspace_bytes", static_cast<int64_t>(plan.workspace_bytes));
  object.real("waves", plan.waves).text("evidence", plan.evidence);
  object.raw("refusals", "[" + refusals + "]");
  return object.raw("problem", problem_json(problem)).json();
}

}  // namespace nvfp4::cublaslt
