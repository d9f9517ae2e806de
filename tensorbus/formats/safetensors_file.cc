#include "tensorbus/formats/safetensors_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/formats/file.h"
#include "tensorbus/formats/json_fields.h"

namespace tensorbus::formats {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";

/// One tensor and where its data begins.
struct Entry {
  std::uint64_t begin = 0;
  TensorSpec spec;
};

Result<Entry> ParseEntry(const std::string& name, Json json, std::uint64_t data_bytes) {
  TB_RETURN_IF_ERROR(CheckObject(json, QuotedTensor(name)));
  json["name"] = name;
  Entry entry;
  TB_ASSIGN_OR_RETURN(entry.spec, ParseTensorSpec(json));
  const auto offsets = [&]() -> Status {
    TB_ASSIGN_OR_RETURN(const Json* pair, ArrayField(json, "data_offsets"));
    if (pair->size() != 2) return Malformed("field 'data_offsets': a pair [begin, end] is needed");
    TB_ASSIGN_OR_RETURN(entry.begin, AsUint((*pair)[0], "field 'data_offsets'", data_bytes));
    TB_ASSIGN_OR_RETURN(const std::uint64_t end,
                        AsUint((*pair)[1], "field 'data_offsets'", data_bytes));
    if (end < entry.begin || end - entry.begin != entry.spec.bytes()) {
      return Malformed(
          fmt::format("field 'data_offsets': [{}, {}] is not {} bytes, which shape {} takes",
                      entry.begin, end, entry.spec.bytes(), entry.spec.shape.ToString()));
    }
    return {};
  };
  const Status status = offsets();
  if (!status.ok()) return status.Annotate(QuotedTensor(name));
  return entry;
}

/// The JSON text at the head of a file, and how many bytes of data follow it.
Result<std::pair<std::string, std::uint64_t>> HeaderText(const std::string& path) {
  std::error_code error;
  const std::uint64_t file_bytes = fs::file_size(path, error);
  if (error) return ErrnoStatus(error.value(), path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return ErrnoStatus(errno != 0 ? errno : EIO, path);
  std::array<char, 8> length = {};
  if (file_bytes < length.size() || !file.read(length.data(), length.size()))
    return Malformed(fmt::format("{}: too short for a safetensors file", path));
  std::uint64_t header_bytes = 0;
  for (std::size_t i = length.size(); i-- > 0;)
    header_bytes = header_bytes << 8 | static_cast<unsigned char>(length[i]);
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return Malformed(fmt::format("{}: a header of {} bytes; at most {} are read", path,
                                 header_bytes, kMaxSafetensorsHeaderBytes));
  }
  if (header_bytes > file_bytes - length.size()) {
    return Malformed(fmt::format("{}: truncated: a header of {} bytes in a file of {}", path,
                                 header_bytes, file_bytes));
  }
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())))
    return ErrnoStatus(errno != 0 ? errno : EIO, path);
  return std::pair(std::move(text), file_bytes - length.size() - header_bytes);
}

/// By file name, the tensors the index places there.
Result<std::map<std::string, std::vector<std::string>>> ReadIndex(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  const auto parse = [&]() -> Result<std::map<std::string, std::vector<std::string>>> {
    TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
    TB_ASSIGN_OR_RETURN(const Json* map, Field(json, "weight_map"));
    TB_RETURN_IF_ERROR(CheckObject(*map, "field 'weight_map'"));
    std::map<std::string, std::vector<std::string>> files;
    for (const auto& [name, file] : map->items()) {
      TB_ASSIGN_OR_RETURN(const std::string in, AsString(file, QuotedTensor(name)));
      if (in.empty() || in.find('/') != std::string::npos)
        return Malformed(fmt::format("{}: '{}' is not a plain file name", QuotedTensor(name), in));
      files[in].push_back(name);
    }
    return files;
  };
  auto files = parse();
  if (!files.ok()) return files.status().Annotate(path);
  return files;
}

Result<std::vector<TensorSpec>> ReadIndexed(const std::string& folder, const std::string& index) {
  TB_ASSIGN_OR_RETURN(const auto files, ReadIndex(index));
  if (files.size() > kMaxSafetensorsFiles)
    return Malformed(fmt::format("{}: more than {} files", index, kMaxSafetensorsFiles));
  std::vector<TensorSpec> tensors;
  for (const auto& [file, names] : files) {
    const std::string path = folder + "/" + file;
    TB_ASSIGN_OR_RETURN(std::vector<TensorSpec> held, ReadSafetensorsHeader(path));
    const std::unordered_set<std::string_view> wanted(names.begin(), names.end());
    std::size_t found = 0;
    std::unordered_set<std::string> seen;
    for (TensorSpec& spec : held) {
      if (wanted.find(spec.name) == wanted.end()) continue;
      ++found;
      seen.insert(spec.name);
      tensors.push_back(std::move(spec));
    }
    if (found == names.size()) continue;
    const auto missing = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return seen.find(name) == seen.end();
    });
    return Malformed(
        fmt::format("{}: {} is not in it, but the index says so", path, QuotedTensor(*missing)));
  }
  return tensors;
}

}  // namespace

Result<std::vector<TensorSpec>> ParseSafetensorsHeader(std::string_view text,
                                                       std::uint64_t data_bytes) {
  TB_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  TB_RETURN_IF_ERROR(CheckObject(json, "the header"));
  std::vector<Entry> entries;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") continue;
    TB_ASSIGN_OR_RETURN(Entry entry, ParseEntry(name, value, data_bytes));
    entries.push_back(std::move(entry));
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  std::vector<TensorSpec> tensors;
  for (Entry& entry : entries) tensors.push_back(std::move(entry.spec));
  return tensors;
}

Result<std::vector<TensorSpec>> ReadSafetensorsHeader(const std::string& path) {
  TB_ASSIGN_OR_RETURN(const auto head, HeaderText(path));
  auto tensors = ParseSafetensorsHeader(head.first, head.second);
  if (!tensors.ok()) return tensors.status().Annotate(path);
  return tensors;
}

Result<std::vector<TensorSpec>> ReadSafetensorsFolder(const std::string& folder) {
  std::error_code error;
  const std::string index = folder + "/" + kIndexName;
  if (fs::exists(index, error)) return ReadIndexed(folder, index);
  std::vector<std::string> paths;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors") paths.push_back(at->path().string());
    if (paths.size() > kMaxSafetensorsFiles)
      return Malformed(fmt::format("{}: more than {} files", folder, kMaxSafetensorsFiles));
  }
  if (error) return ErrnoStatus(error.value(), folder);
  if (paths.empty())
    return Status(Code::kNotFound, fmt::format("{}: no *.safetensors file in it", folder));
  std::sort(paths.begin(), paths.end());
  std::vector<TensorSpec> tensors;
  std::map<std::string, std::size_t> holders;  // name -> index into paths
  for (std::size_t p = 0; p < paths.size(); ++p) {
    TB_ASSIGN_OR_RETURN(std::vector<TensorSpec> held, ReadSafetensorsHeader(paths[p]));
    for (TensorSpec& spec : held) {
      const auto [holder, fresh] = holders.emplace(spec.name, p);
      if (!fresh) {
        return Malformed(fmt::format("{} is in both {} and {}", QuotedTensor(spec.name),
                                     paths[holder->second], paths[p]));
      }
      tensors.push_back(std::move(spec));
    }
    if (tensors.size() > kMaxTensors)
      return Malformed(fmt::format("{}: more than {} tensors", folder, kMaxTensors));
  }
  return tensors;
}

}  // namespace tensorbus::formats
