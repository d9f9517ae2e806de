#include "tensorbus/cli/html.h"

#include <fmt/format.h>

namespace tensorbus::cli {
namespace {

constexpr const char* kStyle = R"~(
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6670; --line: #d8dde3; --page: #ffffff;
        --card: #f5f7f9; --ours: #2f6db5; --peer: #8d99a6; --ceiling: #c9d1d9; --good: #1d7a46;
        --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #343b44; --page: #14181d; --card: #1c2229;
          --ours: #6aa5e8; --peer: #7b8794; --ceiling: #3d4752; --good: #58c789; --bad: #ff8a80; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 2px; }
p.sub { color: var(--soft); margin: 0 0 16px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 0 0 18px; }
.fact { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.fact b { display: block; font-size: 19px; font-variant-numeric: tabular-nums; }
.fact span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 12px; }
/* A shadow at a side says that the table goes on there. */
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--page) 40%, transparent) 0 0 / 36px 100% no-repeat local,
  linear-gradient(to left, var(--page) 40%, transparent) 100% 0 / 36px 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) 0 0 / 14px 100% no-repeat,
  linear-gradient(to left, var(--line), transparent) 100% 0 / 14px 100% no-repeat; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  margin-top: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
td.ok { color: var(--good); } td.bad { color: var(--bad); }
td.why { text-align: left; white-space: normal; color: var(--soft); }
.legend { color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin: 0 5px 0 14px; }
)~";

}  // namespace

std::string Escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string Fact(const std::string& value, const char* what) {
  return fmt::format(R"~(<div class="fact"><b>{}</b><span>{}</span></div>)~", Escape(value), what);
}

std::string PageHead(const std::string& title, const std::string& heading) {
  return fmt::format(
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>{}</title><style>{}</style></head>"
      "<body><main><h1>{}</h1>",
      Escape(title), kStyle, Escape(heading));
}

std::string PageTail() {
  return "</main></body></html>\n";
}

}  // namespace tensorbus::cli
