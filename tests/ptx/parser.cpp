// From the text of PTX to a program: directives (PTX ISA, chapter 11), state spaces (5), names and operands (4 and 6).
// An instruction that is not understood becomes UNKNOWN, an error only where a thread meets it.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <regex>
#include <set>

#include "program.h"

namespace {

const std::map<std::string, Type> TYPES = {{"pred", PRED}, {"b8", B8}, {"u8", U8}, {"s8", S8}, {"b16", B16}, {"u16", U16}, {"s16", S16},
    {"f16", F16}, {"bf16", BF16}, {"b32", B32}, {"u32", U32}, {"s32", S32}, {"f32", F32}, {"f16x2", F16X2}, {"bf16x2", BF16X2},
    {"b64", B64}, {"u64", U64}, {"s64", S64}, {"f64", F64}, {"b128", B128}};

std::string trimmed(const std::string& s) {
    const auto a = s.find_first_not_of(" \t\r\n"), b = s.find_last_not_of(" \t\r\n");
    return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}
std::vector<std::string> split(const std::string& s, char at) {
    std::vector<std::string> parts;
    int depth = 0;
    std::string part;
    for (char c : s) {
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c == at && depth == 0) parts.push_back(trimmed(part)), part.clear();
        else part += c;
    }
    if (!trimmed(part).empty() || !parts.empty()) parts.push_back(trimmed(part));
    return parts;
}
bool begins(const std::string& s, const char* with) { return s.rfind(with, 0) == 0; }

bool number_of(const std::string& s, u64* value) {
    if (s.empty()) return false;
    if (begins(s, "0f") || begins(s, "0F")) { *value = strtoull(s.c_str() + 2, nullptr, 16); return true; }
    if (begins(s, "0d") || begins(s, "0D")) { *value = strtoull(s.c_str() + 2, nullptr, 16); return true; }
    if (!(isdigit(s[0]) || ((s[0] == '-' || s[0] == '+') && s.size() > 1))) return false;
    char* end;
    if (s[0] == '-') *value = (u64)strtoll(s.c_str(), &end, 0);
    else *value = strtoull(s.c_str(), &end, 0);
    while (*end == 'U' || *end == 'u') ++end;
    return *end == 0;
}

class Parser {
  public:
    explicit Parser(Module* m) : module_(m) {}

    void parse() {
        const std::string& t = module_->text;
        size_t i = 0;
        int line = 1;
        std::string statement;
        // Statements end in ; or { or } or a label's colon.
        while (i < t.size()) {
            char c = t[i];
            if (c == '\n') ++line;
            if (c == '/' && i + 1 < t.size() && t[i + 1] == '/') { while (i < t.size() && t[i] != '\n') ++i; continue; }
            if (c == '/' && i + 1 < t.size() && t[i + 1] == '*') { i = t.find("*/", i) + 2; continue; }
            if (c == '"') { const size_t end = t.find('"', i + 1); statement += t.substr(i, end - i + 1); i = end + 1; continue; }
            if (!function_ && statement.find(".entry") == std::string::npos && statement.find(".func") == std::string::npos && c == '\n' &&
                (begins(trimmed(statement), ".version") || begins(trimmed(statement), ".target") || begins(trimmed(statement), ".address_size")))
                statement.clear();
            if (trimmed(statement).empty()) line_ = line;
            if (c == '{' && function_ == nullptr && statement.find("=") == std::string::npos) { header(trimmed(statement)); statement.clear(); ++i; continue; }
            if (c == '{' && function_ && trimmed(statement).empty()) { scopes_.emplace_back(); ++i; continue; }
            if (c == '}' && function_ && trimmed(statement).empty()) {
                scopes_.pop_back();
                if (scopes_.empty()) end_function();
                ++i;
                continue;
            }
            if (c == '}' && skipping_ && function_ == nullptr) { skipping_ = false; statement.clear(); ++i; continue; }
            if (c == ';') {
                if (!skipping_) { if (function_) body(trimmed(statement)); else variable(trimmed(statement)); }
                statement.clear();
                ++i;
                continue;
            }
            statement += c;
            if (c == ':' && function_ && i + 1 < t.size() && (t[i + 1] == '\n' || t[i + 1] == ' ' || t[i + 1] == '\t' || t[i + 1] == '\r')) {
                const std::string label = trimmed(statement);
                if (label.find_first_of(" \t") == std::string::npos) { labels_[label.substr(0, label.size() - 1)] = function_->code.size(); statement.clear(); }
            }
            ++i;
        }
    }

  private:
    Module* module_;
    Function* function_ = nullptr;
    bool skipping_ = false;
    int line_ = 0;
    std::vector<std::map<std::string, Operand>> scopes_;
    std::map<std::string, int> labels_;
    std::vector<std::pair<int, std::string>> jumps_;
    std::map<std::string, u64> shared_, local_, parameters_;
    std::map<std::string, u64> module_shared_;
    std::map<std::string, int> constants_;
    std::vector<std::string> dynamic_;

    void header(const std::string& s) {
        const size_t entry = s.find(".entry");
        if (entry == std::string::npos) { skipping_ = true; return; }  // functions are not called here
        const size_t open = s.find('(', entry);
        const size_t close = s.find(')', entry);
        auto made = std::make_unique<Function>();
        function_ = made.get();
        function_->module = module_;
        function_->name = trimmed(s.substr(entry + 6, open - entry - 6));
        for (auto& p : split(s.substr(open + 1, close - open - 1), ',')) parameter(p);
        const size_t threads = s.find(".maxntid");
        if (threads != std::string::npos) {
            u32 n = 1;
            const auto rest = s.substr(threads + 8);
            for (auto& part : split(rest.substr(0, rest.find_first_of(".\n")), ',')) n *= atoi(part.c_str());
            function_->threads = n;
        }
        module_->functions[function_->name] = std::move(made);
        scopes_.clear();
        scopes_.emplace_back();
        labels_.clear(), jumps_.clear(), local_.clear(), constants_.clear();
        shared_ = module_shared_;
        for (auto& [name, size] : shared_) place_shared(name, size >> 8, size & 255);
    }
    void place_shared(const std::string& name, u64 bytes, u64 align) {
        align = std::max<u64>(align, 1);
        function_->static_bytes = (function_->static_bytes + align - 1) / align * align;
        shared_[name] = function_->static_bytes;
        function_->static_bytes += bytes;
    }
    // "... .align 4 .b8 name[20]": type, name, bytes, alignment.
    void declaration(const std::string& s, std::string* name, u64* bytes, u64* align, Type* type, bool* is_open) {
        std::string words = s;
        for (char& c : words) if (c == '\n' || c == '\t') c = ' ';
        const size_t equals = words.find('=');
        if (equals != std::string::npos) words = words.substr(0, equals);
        *align = 0, *type = B8, *is_open = false;
        std::vector<std::string> parts;
        for (auto& w : split(words, ' ')) if (!w.empty()) parts.push_back(w);
        u64 count = 1;
        for (size_t i = 0; i < parts.size(); ++i) {
            if (parts[i] == ".align") *align = atoi(parts[++i].c_str());
            else if (parts[i][0] == '.' && TYPES.count(parts[i].substr(1))) *type = TYPES.at(parts[i].substr(1));
            else if (parts[i][0] != '.') {
                std::string n = parts[i];
                size_t open = n.find('[');
                *name = n.substr(0, open);
                while (open != std::string::npos) {
                    const size_t close = n.find(']', open);
                    const std::string inside = n.substr(open + 1, close - open - 1);
                    if (inside.empty()) *is_open = true; else count *= strtoull(inside.c_str(), nullptr, 0);
                    open = n.find('[', close);
                }
            }
        }
        *bytes = count * bytes_of(*type);
        if (!*align) *align = bytes_of(*type);
    }
    void parameter(const std::string& s) {
        std::string name; u64 bytes, align; Type type; bool open;
        if (s.find(".param") == std::string::npos) return;
        // Attributes of a pointer: their alignment is the pointee's.
        static const std::regex pointee("\\.ptr(\\s+\\.(global|shared|local|const))?(\\s+\\.align\\s+\\d+)?");
        declaration(std::regex_replace(s, pointee, ""), &name, &bytes, &align, &type, &open);
        u32& total = function_->parameter_total;
        total = (total + align - 1) / align * align;
        function_->parameter_names.push_back(name);
        function_->parameter_sizes.push_back(bytes);
        function_->parameter_offsets.push_back(total);
        total += bytes;
    }
    void variable(const std::string& s) {
        std::string name; u64 bytes, align; Type type; bool open;
        if (s.find(".func") != std::string::npos) return;  // a declaration
        declaration(s, &name, &bytes, &align, &type, &open);
        if (s.find(".shared") != std::string::npos) {
            if (open) dynamic_.push_back(name); else module_shared_[name] = bytes << 8 | align;
            return;
        }
        if (s.find(".global") == std::string::npos && s.find(".const") == std::string::npos) return;
        module_->storage.emplace_back(bytes + 16);
        u8* p = module_->storage.back().data();
        p += (16 - (u64)p % 16) % 16;
        const size_t equals = s.find('=');
        if (equals != std::string::npos) {
            std::string values = trimmed(s.substr(equals + 1));
            if (values[0] == '{') values = values.substr(1, values.size() - 2);
            u64 i = 0;
            for (auto& v : split(values, ',')) {
                u64 x;
                if (!number_of(v, &x)) continue;
                memcpy(p + i, &x, bytes_of(type));
                i += bytes_of(type);
            }
        }
        module_->globals[name] = {(u64)p, bytes};
    }

    Operand* lookup(const std::string& name) {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
            if (auto it = scope->find(name); it != scope->end()) return &it->second;
        return nullptr;
    }
    void registers(const std::string& s) {
        // .reg .b32 %r<30>; or .reg .pred p, q;
        std::string words = s.substr(4);
        for (char& c : words) if (c == '\t' || c == '\n') c = ' ';
        words = trimmed(words);
        const size_t space = words.find(' ');
        const Type type = TYPES.at(words.substr(1, space - 1));
        for (auto name : split(words.substr(space), ',')) {
            int count = -1;
            const size_t open = name.find('<');
            if (open != std::string::npos) count = atoi(name.c_str() + open + 1), name = name.substr(0, open);
            for (int i = 0; i < std::max(count, 1); ++i) {
                Operand o;
                o.kind = type == PRED ? Operand::PREG : Operand::REG;
                o.wide = bytes_of(type) == 8;
                if (bytes_of(type) == 16) { fail("registers of 128 bits"); }
                o.index = type == PRED ? function_->count_pred++ : o.wide ? function_->count64++ : function_->count32++;
                scopes_.back()[count < 0 ? name : name + std::to_string(i)] = o;
            }
        }
    }
    int constant(u64 value) {
        const std::string key = std::to_string(value);
        if (!constants_.count(key)) {
            constants_[key] = function_->constants.size();
            std::array<u64, 32> all;
            all.fill(value);
            function_->constants.push_back(all);
        }
        return constants_[key];
    }
    bool symbol(const std::string& s, u64* value) {
        if (auto it = shared_.find(s); it != shared_.end()) { *value = it->second; return true; }
        for (auto& name : dynamic_) if (name == s) { *value = DYNAMIC; return true; }
        if (auto it = local_.find(s); it != local_.end()) { *value = it->second; return true; }
        for (size_t i = 0; i < function_->parameter_names.size(); ++i)
            if (function_->parameter_names[i] == s) { *value = function_->parameter_offsets[i]; return true; }
        if (auto it = module_->globals.find(s); it != module_->globals.end()) { *value = it->second.first; return true; }
        return false;
    }
    static constexpr u64 DYNAMIC = 0xd1ace0000;  // replaced where the function ends
    std::set<int> dynamic_constants_;

    Operand operand(std::string s) {
        Operand o;
        if (s == "_") { o.kind = Operand::SINK; return o; }
        if (s[0] == '!') { o = operand(trimmed(s.substr(1))); o.negated = true; return o; }
        if (s[0] == '[') {
            s = trimmed(s.substr(1, s.size() - 2));
            const size_t plus = s.find('+');
            i64 offset = 0;
            if (plus != std::string::npos) { offset = strtoll(s.c_str() + plus + 1, nullptr, 0); s = trimmed(s.substr(0, plus)); }
            o = operand(s);
            o.offset = offset;
            return o;
        }
        if (Operand* known = lookup(s)) return *known;
        u64 value;
        if (number_of(s, &value)) { o.kind = Operand::IMM; o.index = constant(value); return o; }
        if (s[0] == '%') {
            static const std::set<std::string> known = {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
                "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"};
            if (!known.count(s)) fail("register " + s);
            if (!function_->specials.count(s)) function_->specials[s] = function_->count32++;
            o.kind = Operand::REG;
            o.index = function_->specials[s];
            return o;
        }
        if (s == "WARP_SZ") { o.kind = Operand::IMM; o.index = constant(32); return o; }
        if (symbol(s, &value)) {
            o.kind = Operand::IMM;
            o.index = constant(value);
            if (value == DYNAMIC) dynamic_constants_.insert(o.index);
            return o;
        }
        o.kind = Operand::LABEL;
        return o;
    }
    std::vector<Operand> operands(const std::string& s) {
        std::vector<Operand> found;
        if (s[0] == '{') {
            for (auto& part : split(s.substr(1, s.size() - 2), ',')) found.push_back(operand(part));
        } else if (s[0] != '[' && s.find('|') != std::string::npos) {
            for (auto& part : split(s, '|')) found.push_back(operand(part));
        } else {
            found.push_back(operand(s));
        }
        return found;
    }

    void body(std::string s) {
        if (s.empty()) return;
        if (begins(s, ".reg")) { registers(s); return; }
        if (begins(s, ".shared") || begins(s, ".local")) {
            std::string name; u64 bytes, align; Type type; bool open;
            declaration(s, &name, &bytes, &align, &type, &open);
            if (begins(s, ".shared")) place_shared(name, bytes, align);
            else {
                function_->local_bytes = (function_->local_bytes + align - 1) / align * align;
                local_[name] = function_->local_bytes;
                function_->local_bytes += bytes;
            }
            return;
        }
        if (begins(s, ".pragma") || begins(s, ".loc") || begins(s, ".file") || begins(s, ".branchtargets") || begins(s, ".param")) return;
        try {
            instruction(s);
        } catch (Error& e) {
            Ins i;
            i.text = s + " (" + e.what() + ")", i.line = line_;
            function_->code.push_back(i);
        }
    }

    void instruction(std::string s) {
        Ins i;
        i.line = line_;
        i.text = s;
        std::replace(i.text.begin(), i.text.end(), '\t', ' ');
        if (s[0] == '@') {
            const size_t space = s.find_first_of(" \t");
            std::string g = s.substr(1, space - 1);
            if (g[0] == '!') i.guard_negated = true, g = g.substr(1);
            Operand* p = lookup(g);
            if (!p || p->kind != Operand::PREG) fail("guard " + g);
            i.guard = p->index;
            s = trimmed(s.substr(space));
        }
        const size_t space = s.find_first_of(" \t\n");
        const std::string opcode = s.substr(0, space);
        const std::string rest = space == std::string::npos ? "" : trimmed(s.substr(space));
        const auto parts = split(opcode, '.');
        static const std::map<std::string, Base> bases = {{"abs", ABS}, {"add", ADD}, {"and", AND}, 
            {"bfi", BFI}, {"bra", BRA}, {"clz", CLZ}, {"copysign", COPYSIGN}, {"cvt", CVT}, {"cvta", CVTA},
            {"div", DIV}, {"ex2", EX2}, {"exit", EXIT}, {"ret", EXIT}, {"fma", FMA}, {"ld", LD}, {"ldmatrix", LDMATRIX},
            {"mad", MAD}, {"max", MAX}, {"min", MIN}, {"mma", MMA}, {"mov", MOV}, {"mul", MUL}, {"neg", NEG}, {"not", NOT}, {"or", OR},
            {"popc", POPC}, {"rcp", RCP}, {"rem", REM}, {"selp", SELP}, {"setp", SETP},
            {"shfl", SHFL}, {"shl", SHL}, {"shr", SHR}, {"sqrt", SQRT}, {"st", ST}, {"sub", SUB}, {"vote", VOTE},
            {"xor", XOR}};
        const std::string& base = parts[0];
        if (base == "bar" || base == "barrier") i.base = parts[1] == "warp" ? BARWARP : BAR;
        else if (base == "cp") i.base = opcode == "cp.async.wait_all" ? CPWAIT : CPASYNC;
        else if (bases.count(base)) i.base = bases.at(base);
        else fail("unknown instruction");
        if (i.base == CPASYNC && opcode != "cp.async.cg.shared.global") fail("kind of copy");
        if (i.base == BAR && !(opcode == "bar.sync" || opcode == "barrier.sync.aligned" || opcode == "bar.red.or.pred")) fail("kind of barrier");
        if (i.base == SHFL && opcode != "shfl.sync.bfly.b32") fail("kind of shuffle");
        if (i.base == VOTE && opcode != "vote.sync.any.pred") fail("kind of vote");
        if (i.base == MMA && !(opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" || opcode == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")) fail("kind of mma");
        if (i.base == LDMATRIX && !(begins(opcode, "ldmatrix.sync.aligned.m8n8.x4"))) fail("kind of ldmatrix");
        auto given = rest.empty() ? std::vector<std::string>() : split(rest, ',');
        static const std::map<std::string, int> comparisons = {{"eq", 1}, {"ne", 2}, {"lt", 3}, {"le", 4}, {"gt", 5}, {"ge", 6}, {"lo", 3}, {"ls", 4},
            {"hi", 5}, {"hs", 6}, {"equ", 11}, {"neu", 12}, {"ltu", 13}, {"leu", 14}, {"gtu", 15}, {"geu", 16}};
        std::vector<Type> types;
        for (size_t k = 1; k < parts.size(); ++k) {
            const std::string& p = parts[k];
            if (TYPES.count(p)) types.push_back(TYPES.at(p));
            else if (p == "ftz") i.ftz = true;
            else if (p == "sat") i.sat = true;
            else if (p == "approx" || p == "full") i.approx = true;
            else if (p == "wide") i.wide = true;
            else if (p == "hi" && i.base != SETP) i.hi = true;
            else if (p == "nc") i.nc = true;
            else if (p == "trans") i.trans = true;
            else if (p == "uni") i.uni = true;
            else if (p == "rn" || p == "rni") i.round = 'n', i.integer = p == "rni";
            else if (p == "rz" || p == "rzi") i.round = 'z', i.integer = p == "rzi";
            else if (p == "rm" || p == "rmi") i.round = 'm', i.integer = p == "rmi";
            else if (p == "rp" || p == "rpi") i.round = 'p', i.integer = p == "rpi";
            else if (p == "v2") i.vec = 2;
            else if (p == "v4") i.vec = 4;
            else if (p == "global" && i.base != CPASYNC) i.space = GLOBAL;
            else if (p == "shared" && i.base != CPASYNC) i.space = SHARED;
            else if (p == "local") i.space = LOCAL;
            else if (p == "param") i.space = PARAM;
            else if (p == "const") i.space = CONST;
            else if (i.base == SETP && comparisons.count(p)) i.cmp = comparisons.at(p);
            else if (i.base == SETP) fail("what setp does");
            else if (i.base == BAR && p == "or") i.mode = 1;
            else if (i.base == CVTA && p == "to") i.mode = 1;
        }
        if (rest.find("%globaltimer") != std::string::npos) {  // "Special Registers": nanoseconds
            i.mode = TIME;
            given = {given.at(0), "0"};
        }
        if (i.base == BRA && std::find(parts.begin(), parts.end(), "uni") != parts.end()) i.uni = true;
        if (!types.empty()) i.type = types[0];
        if (types.size() > 1) i.from = types[1];
        if (i.base == MMA) i.from = types[1];
        if (i.base == BRA) {
            jumps_.emplace_back(function_->code.size(), given.at(0));
            function_->code.push_back(i);
            return;
        }
        const bool no_result = i.base == ST || i.base == EXIT || i.base == BARWARP || i.base == CPASYNC || i.base == CPWAIT ||
                               (i.base == BAR && i.mode == 0);
        for (size_t k = 0; k < given.size(); ++k) {
            auto made = operands(given[k]);
            for (auto& o : made) if (o.kind == Operand::LABEL) fail("operand " + given[k]);
            auto& to = k == 0 && !no_result ? i.d : i.s;
            to.insert(to.end(), made.begin(), made.end());
        }
        if (i.base == SETP && i.d.size() > 1) fail("a second predicate");
        function_->code.push_back(i);
    }

    void end_function() {
        Function* f = function_;
        for (auto& [at, label] : jumps_) {
            if (labels_.count(label)) f->code[at].target = labels_[label];
            else f->code[at].base = UNKNOWN;
        }
        Ins last;
        last.base = EXIT;
        f->code.push_back(last);
        f->dynamic_start = (f->static_bytes + 15) / 16 * 16;
        for (int c : dynamic_constants_) f->constants[c].fill(f->dynamic_start);
        dynamic_constants_.clear();
        function_ = nullptr;
    }
};

}  // namespace

void parse(Module* module) { Parser(module).parse(); }
