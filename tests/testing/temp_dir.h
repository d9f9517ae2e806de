#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tensorbus/base/check.h"

namespace tensorbus::testing {

/// A private temporary folder (mode 0700), removed with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "tensorbus-test-XXXXXX").string();
    TB_CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string Join(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace tensorbus::testing
