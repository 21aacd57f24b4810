// What the driver asks for: modules, launches, what was found.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <mutex>

#include "block.h"
#include "interpreter.h"

namespace {
std::map<std::string, u64> findings_;
u32 launches = 0;
std::vector<Function*> ran;
}  // namespace

void found(const std::string& where, const std::string& what) { ++findings_[what + "\t" + where]; }
std::string findings() {
    std::string text;
    for (auto& [what, count] : findings_) text += std::to_string(count) + "\t" + what + "\n";
    findings_.clear();
    return text;
}
std::string counts() {
    std::string text;
    for (Function* f : ran) {
        u64 all = 0, mma = 0;
        for (auto& i : f->code) all += i.runs, mma += i.base == MMA ? i.runs : 0;
        text += f->name + "\t" + std::to_string(all) + "\t" + std::to_string(mma) + "\n";
    }
    return text;
}

Module* load_ptx(const char* text, std::string* error) {
    auto* m = new Module;
    m->text = text;
    m->storage.reserve(4096);
    try {
        parse(m);
    } catch (std::exception& e) {
        *error = e.what();
        return nullptr;
    }
    return m;
}
Function* find_function(Module* m, const char* name) {
    auto it = m->functions.find(name);
    return it == m->functions.end() ? nullptr : it->second.get();
}
const std::string& name_of(Function* f) { return f->name; }
const std::vector<u32>& parameter_bytes(Function* f) { return f->parameter_sizes; }
u32 static_shared(Function* f) { return f->static_bytes - SHARED_START; }
u32 most_threads(Function* f) { return f->threads; }
std::vector<std::string> names_of(Module* m) {
    std::vector<std::string> names;
    for (auto& [name, function] : m->functions) names.push_back(name);
    return names;
}

bool run_grid(Function* f, const u32 grid[3], const u32 block[3], u32 dynamic, void** arguments, Memory* memory) {
    ++launches;
    chance.seed(seed() * 1000003 + launches);
    std::vector<u8> parameters(f->parameter_total + 16);
    for (size_t i = 0; i < f->parameter_sizes.size(); ++i) memcpy(&parameters[f->parameter_offsets[i]], arguments[i], f->parameter_sizes[i]);
    std::vector<u32> order(grid[0] * grid[1] * grid[2]);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), chance);
    if (std::find(ran.begin(), ran.end(), f) == ran.end()) ran.push_back(f);
    try {
        Block b(f, memory, grid, block, dynamic, parameters.data(), launches);
        for (u32 number : order) b.run(number);
    } catch (std::exception& e) {
        found(f->name, std::string("stopped: ") + e.what());
        fprintf(stderr, "ptx: %s\n", e.what());
        return false;
    }
    return true;
}
