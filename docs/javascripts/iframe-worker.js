// The search runs in a worker, and a browser starts none for a page that was opened from a folder: there its script
// runs in a hidden frame of the page. mkdocs' offline plugin would load such a script from another machine.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const page = this.inside.document;
      page.open();
      page.write(`<body><script>
        postMessage = answer;
        importScripts = async (...urls) => {
          for (const url of urls)
            await new Promise((loaded, failed) => {
              const script = document.createElement("script");
              Object.assign(script, { src: url, onload: loaded, onerror: failed });
              document.body.append(script);
            });
        };
      </script><script src="${new URL(url, location)}"></script></body>`);
      this.ready = new Promise((loaded) => this.inside.addEventListener("load", loaded));
      page.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
