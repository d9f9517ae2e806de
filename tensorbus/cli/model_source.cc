#include "tensorbus/cli/model_source.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <vector>

#include "planner/name_class.h"
#include "planner/near_names.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json.h"
#include "tensorbus/formats/manifest_file.h"
#include "tensorbus/formats/model_config_file.h"
#include "tensorbus/formats/safetensors_file.h"

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kManifestSuffix = ".json.gz";

Status NoSuchModel(const std::string& name, const std::string& manifests) {
  std::vector<std::string> known;
  std::error_code error;
  for (fs::directory_iterator at(manifests, error), end; !error && at != end; at.increment(error)) {
    const std::string file = at->path().filename().string();
    if (file.size() > kManifestSuffix.size() && file.ends_with(kManifestSuffix))
      known.push_back(file.substr(0, file.size() - kManifestSuffix.size()));
  }
  std::sort(known.begin(), known.end());
  planner::NearNames near(name);
  for (const std::string& other : known) near.Consider(other);
  return {
      Code::kNotFound,
      fmt::format("no model '{}'{}; a manifest is needed ({}), a folder of safetensors files or "
                  "a config.json",
                  name, planner::NearNames::Hint(near.Take()), fmt::join(known, ", ")),
      Reason::kMalformed};
}

/// What the names tell where there is no config.json: how many layers and experts there are.
void CountFromNames(Manifest* model) {
  std::int64_t layers = 0;
  std::int64_t experts = 0;
  for (const TensorSpec& spec : model->tensors) {
    if (const auto layer = planner::LayerOf(spec.name); layer && *layer < kMaxTensors)
      layers = std::max(layers, static_cast<std::int64_t>(*layer) + 1);
    if (const auto expert = planner::ExpertOf(spec.name); expert && *expert < kMaxTensors)
      experts = std::max(experts, static_cast<std::int64_t>(*expert) + 1);
  }
  model->config["layers"] = layers;
  if (experts != 0) model->config["experts"] = experts;
}

Result<Manifest> LoadFolder(const std::string& folder) {
  Manifest model;
  model.model = folder;
  TB_ASSIGN_OR_RETURN(model.tensors, formats::ReadSafetensorsFolder(folder));
  const std::string config = folder + "/config.json";
  std::error_code error;
  if (!fs::exists(config, error)) {
    CountFromNames(&model);
    return model;
  }
  auto described = formats::ReadModelConfig(config);
  // The tensors are known all the same when the family is not.
  if (!described.ok() && described.status().code() == Code::kUnimplemented) {
    CountFromNames(&model);
    return model;
  }
  if (!described.ok()) return described.status();
  model.config = std::move(described->numbers);
  return model;
}

Result<Manifest> LoadFile(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, formats::ReadText(path));
  const auto parse = [&]() -> Result<Manifest> {
    TB_ASSIGN_OR_RETURN(const formats::Json json, formats::ParseJson(text));
    if (json.is_object() && json.contains("format")) return formats::ParseManifest(text);
    TB_ASSIGN_OR_RETURN(const formats::ModelDescription described, formats::ParseModelConfig(text));
    return formats::ManifestOf(path, described);
  };
  auto model = parse();
  if (!model.ok()) return model.status().Annotate(path);
  return model;
}

/// Every decoder layer must have tensors, or a plan would quietly leave it out.
Status CheckLayers(const Manifest& model) {
  const auto found = model.config.find("layers");
  if (found == model.config.end() || found->second <= 0) return {};
  const auto layers =
      static_cast<std::uint64_t>(std::min<std::int64_t>(found->second, kMaxTensors));
  std::vector<bool> present(layers);
  for (const TensorSpec& spec : model.tensors) {
    const auto layer = planner::LayerOf(spec.name);
    if (layer && *layer < layers) present[*layer] = true;
  }
  std::vector<std::uint64_t> missing;
  for (std::uint64_t l = 0; l < layers; ++l) {
    if (!present[l]) missing.push_back(l);
  }
  if (missing.empty()) return {};
  constexpr std::size_t kShown = 8;
  const std::size_t shown = std::min(missing.size(), kShown);
  return {Code::kInvalidArgument,
          fmt::format("{} of its {} layers have no tensors: {}{}", missing.size(), layers,
                      fmt::join(std::span(missing).first(shown), ", "),
                      shown < missing.size() ? ", …" : ""),
          Reason::kLayoutMismatch};
}

}  // namespace

Result<Manifest> LoadModel(const std::string& name, const std::string& manifests) {
  std::error_code error;
  const auto load = [&]() -> Result<Manifest> {
    const std::string known = manifests + "/" + name + std::string(kManifestSuffix);
    if (name.find('/') == std::string::npos && fs::exists(known, error))
      return formats::ReadManifest(known);
    if (fs::is_directory(name, error)) return LoadFolder(name);
    if (fs::exists(name, error)) return LoadFile(name);
    return NoSuchModel(name, manifests);
  };
  TB_ASSIGN_OR_RETURN(Manifest model, load());
  const Status complete = CheckLayers(model);
  if (!complete.ok()) return complete.Annotate(fmt::format("model '{}'", name));
  return model;
}

}  // namespace tensorbus::cli
