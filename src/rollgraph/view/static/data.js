// All data of the page comes from `source`: the API of the server, or the JSON inside an exported file.

import { ApiSource } from "./api_source.js";
import { ExportSource } from "./export_source.js";

const exported = document.getElementById("rollgraph-export");

export const source = exported ? new ExportSource(JSON.parse(exported.textContent)) : new ApiSource();
