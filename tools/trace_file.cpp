#include "trace_file.h"

#include <cerrno>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>

#include "safetensors.h"

namespace stepgraph::tools {
namespace {

constexpr const char* columns[] = {"arrival_ms", "input_tokens", "output_tokens"};
constexpr std::string_view header = "arrival_ms,input_tokens,output_tokens";

[[noreturn]] void refuse(const std::string& what, std::string_view value, const std::string& must) {
    throw CaseError(what + " is " + quoted(std::string(value)) + ", must be " + must);
}

int number(std::string_view text, const std::string& line, int column) {
    const int least = column == 0 ? 0 : 1;
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least) {
        refuse(line + ": " + columns[column], text, "a whole number from " + std::to_string(least) + " to 2147483647");
    }
    return value;
}

TraceRequest request(std::string_view text, const std::string& line) {
    const size_t first = text.find(',');
    const size_t second = first == std::string_view::npos ? first : text.find(',', first + 1);
    if (second == std::string_view::npos || text.find(',', second + 1) != std::string_view::npos) {
        refuse(line, text, "three numbers with commas between them");
    }
    return {.arrival_ms = number(text.substr(0, first), line, 0),
            .prompt_tokens = number(text.substr(first + 1, second - first - 1), line, 1),
            .generated_tokens = number(text.substr(second + 1), line, 2)};
}

}  // namespace

std::vector<TraceRequest> read_trace(const std::filesystem::path& path) {
    errno = 0;
    std::ifstream file(path);
    std::string text;
    int line = 0;
    std::vector<TraceRequest> trace;
    while (std::getline(file, text)) {
        const std::string here = path.string() + ", line " + std::to_string(++line);
        if (text.ends_with('\r')) {
            text.pop_back();
        }
        if (line == 1) {
            if (text != header) {
                refuse(here, text, std::string(header));
            }
            continue;
        }
        trace.push_back(request(text, here));
        if (trace.size() > 1 && trace.back().arrival_ms < trace[trace.size() - 2].arrival_ms) {
            refuse(here + ": arrival_ms", std::to_string(trace.back().arrival_ms),
                   "at least that of the line before, " + std::to_string(trace[trace.size() - 2].arrival_ms));
        }
    }
    if (!file.eof()) {
        throw CaseError(path.string() + ": cannot be read: " + std::generic_category().message(errno));
    }
    if (trace.empty()) {
        throw CaseError(path.string() + ": " + (line == 0 ? "is empty" : "holds no request") + ", must hold " +
                        std::string(header) + " and a line a request");
    }
    return trace;
}

}  // namespace stepgraph::tools
