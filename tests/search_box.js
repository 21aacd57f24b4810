// The search box of the site, in node: the worker that the pages load, with the index that they load.
//     node search_box.js SITE < queries.json
// Prints, for each query, the pages in their order: the address of the first hit of each.
const fs = require("fs");

const site = process.argv[2];
const queries = JSON.parse(fs.readFileSync(0, "utf8"));
const workers = `${site}/assets/javascripts/workers`;
const name = fs.readdirSync(workers).find((file) => /^search\..*\.js$/.test(file));
const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8"));

// As in Material: a message is SETUP (0), READY (1), QUERY (2) or RESULT (3).
let listen;
let answers;
global.self = global;
global.addEventListener = (kind, handler) => { if (kind === "message") listen = handler; };
global.postMessage = (message) => answers(message);
const ask = (type, data) =>
  new Promise((resolve) => { answers = resolve; listen({ data: { type, data } }); });

(0, eval)(fs.readFileSync(`${workers}/${name}`, "utf8"));
(async () => {
  await ask(0, { config: index.config, docs: index.docs, options: { suggest: false } });
  const found = {};
  for (const query of queries) {
    const { data } = await ask(2, query);
    found[query] = data.items.map((page) => page[0].location);
  }
  console.log(JSON.stringify(found));
})();
