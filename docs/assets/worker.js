/* Search in pages that are opened as files. A browser starts no Worker there, so a hidden frame plays it: the script runs in the
   frame, and what either side posts arrives at the other as a "message" event. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame.contentWindow;
      const toPage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.isReady = new Promise((ready) => {
        const doc = frame.contentDocument;
        const script = doc.createElement("script");
        script.src = url;
        script.onload = ready;
        this.frame.postMessage = (data) => toPage(data);
        this.frame.importScripts = (...urls) =>
          Promise.all(urls.map((src) => new Promise((done) => {
            doc.body.appendChild(Object.assign(doc.createElement("script"), { src, onload: done }));
          })));
        doc.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.isReady.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
