#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tensorbus {

/// A layout before it meets a model: meshes, and a placement for each class of parameters. What the
/// placements mean: share/manifests/layouts.md, section 2.
struct LayoutTemplate {
  struct Mesh {
    std::string name;
    std::vector<std::pair<std::string, std::uint32_t>> axes;  ///< last fastest; size 0: to be given
  };
  struct Rule {
    std::string classes;  ///< regular expression that must match the whole class name
    std::string mesh;
    std::vector<std::pair<std::string, std::string>> placements;  ///< axis, placement; in order
  };
  std::vector<Mesh> meshes;
  std::vector<Rule> rules;  ///< the first match wins
};

/// One job's use of a template.
struct TemplateUse {
  std::string layout;
  std::map<std::string, std::uint32_t> size;  ///< axis -> size
  std::map<std::string, std::string> param;   ///< replaces $word in placements
  std::vector<std::uint32_t> pp_layers;       ///< layers by pipeline stage; or
  std::uint32_t vllm_stages = 0;              ///< …this many stages by vLLM's rule
  std::string drop;  ///< tensors whose name this expression finds are not held; empty: none
};

/// A transfer to plan: one model, two layouts.
struct Scenario {
  std::string id;
  std::string manifest;
  bool colocated = false;  ///< source rank i and target rank i are one device
  TemplateUse source;
  TemplateUse target;
};

/// A layouts file.
struct LayoutBook {
  std::vector<std::pair<std::string, std::string>>
      classes;  ///< class, expression; first match wins
  std::map<std::string, LayoutTemplate> layouts;
  std::vector<Scenario> scenarios;
};

}  // namespace tensorbus
